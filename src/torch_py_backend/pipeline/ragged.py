"""batch_input and batch_output: flatten ragged inputs, create batch inputs, split batch outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_py_backend.config.model_config import BatchInput, ModelConfig
from torch_py_backend.errors import OutputError, counted
from torch_py_backend.pipeline import batches
from torch_py_backend.values import Columns, Items, Value

# The shapes of one input in the requests of a batch, including rows.
_Shapes: TypeAlias = "Sequence[Sequence[int]]"
# Returns outputs, with a list of each item's part in the place of a batch output.
Split: TypeAlias = "Callable[[Items, Columns], list[Value | list[Value]]]"


def splitter(config: ModelConfig) -> Split:
    """Return the function that splits batch outputs as Triton's C++ backends do.

    Element counts are for a whole request, item shapes for one row. It raises OutputError if the
    number of values of a batch output contradicts the shapes of its source.
    """
    sources = config.batch_outputs
    rows = (-1,) if config.max_batch_size else ()

    def split(items: Items, outputs: Columns) -> list[Value | list[Value]]:
        parts: list[Value | list[Value]] = list(outputs)
        for place, (spec, output) in enumerate(zip(config.outputs, outputs, strict=True)):
            if spec.name not in sources:
                continue
            dims, shapes = (*rows, *spec.dims), []
            for item in items:
                sent = item[sources[spec.name]].shape
                shapes.append([sent[axis] if dim == -1 else dim for axis, dim in enumerate(dims)])
            sizes = list(map(math.prod, shapes))
            if len(output) != sum(sizes):
                raise OutputError(
                    f"output '{spec.name}' has {counted(len(output), 'value')}",
                    expected=f"{sum(sizes)}, as batch_output says",
                )
            values = zip(batches.split(output, sizes), shapes, strict=True)
            parts[place] = [value.reshape(shape) for value, shape in values]
        return parts

    return split


def flatten(values: Sequence[Any]) -> Value:
    """Concatenate the values of one input in one dimension; do not copy those of a single item."""
    return batches.concatenate([value.reshape(-1) for value in values])


def batch_input(made: BatchInput) -> Callable[[Sequence[Value]], Value]:
    """Return the function that makes a batch input of the values of its source."""
    numbers = _NUMBERS[made.kind]

    def make(values: Sequence[Value]) -> Tensor:
        shapes = [value.shape for value in values]
        array = np.array(numbers(shapes), dtype=made.dtype.numpy)
        column, source = torch.from_numpy(array), values[0]
        return column.to(source.device) if isinstance(source, Tensor) else column

    return make


def _counts(shapes: _Shapes) -> list[int]:
    return list(map(math.prod, shapes))


def _item_shapes(shapes: _Shapes) -> list[list[int]]:
    return [list(shape[1:]) for shape in shapes for _ in range(shape[0])]


_NUMBERS: Mapping[str, Callable[[_Shapes], npt.ArrayLike]] = {
    "BATCH_ELEMENT_COUNT": _counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes: np.cumsum(_counts(shapes)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: np.cumsum([0, *_counts(shapes)]),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes: np.ravel(_item_shapes(shapes)),
    # Only its shape has a meaning.
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: np.zeros(max(_counts(shapes))),
}
