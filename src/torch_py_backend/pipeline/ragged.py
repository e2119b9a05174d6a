"""batch_input and batch_output: flatten ragged inputs, create batch inputs, split batch outputs."""

from __future__ import annotations

import itertools
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
from torch_py_backend.values import Columns, Items, Value, to_column

# The shapes of one input in the requests of a batch, including rows.
_Shapes: TypeAlias = "Sequence[Sequence[int]]"


class Ragged:
    """Splits batch outputs as Triton's C++ backends do.

    Element counts are for a whole request, item shapes for one row.
    """

    def __init__(self, config: ModelConfig) -> None:
        rows = (-1,) if config.max_batch_size else ()
        self._names = [spec.name for spec in config.outputs]
        self._dims = {spec.name: (*rows, *spec.dims) for spec in config.outputs}
        self._sources = {output.name: output.source for output in config.batch_outputs}

    def split(self, items: Items, outputs: Columns) -> list[Value | list[Value]]:
        """Return outputs, with a list of each item's part in the place of a batch output.

        Raises:
            OutputError: the number of values of a batch output contradicts the shapes.
        """
        return [
            self._parts(name, items, output) if name in self._sources else output
            for name, output in zip(self._names, outputs, strict=True)
        ]

    def _parts(self, name: str, items: Items, output: Value) -> list[Value]:
        """Split a batch output by the shapes of its source."""
        source, dims = self._sources[name], self._dims[name]
        shapes = []
        for item in items:
            sent = item[source].shape
            shapes.append([sent[axis] if size == -1 else size for axis, size in enumerate(dims)])
        sizes = list(map(math.prod, shapes))
        if len(output) != sum(sizes):
            raise OutputError(
                f"output '{name}' has {counted(len(output), 'value')}",
                expected=f"{sum(sizes)}, as batch_output says",
            )
        parts = zip(batches.split(output, sizes), shapes, strict=True)
        return [part.reshape(shape) for part, shape in parts]


def flatten(values: Sequence[Any]) -> Value:
    """Concatenate the values of one input in one dimension; do not copy those of a single item."""
    if len(values) == 1:
        return to_column(values[0].reshape(-1))
    if isinstance(values[0], Tensor):
        return torch.cat([value.reshape(-1) for value in values])
    return to_column(np.concatenate(values, axis=None))


def batch_input(made: BatchInput) -> Callable[[Sequence[Value]], Value]:
    """Return the function that makes a batch input of the values of its source."""
    numbers = _NUMBERS[made.kind]

    def make(values: Sequence[Value]) -> Tensor:
        shapes = [value.shape for value in values]
        array = np.array(numbers(shapes), dtype=made.dtype.numpy)
        column, source = torch.from_numpy(array), values[0]
        return column.to(source.device) if isinstance(source, Tensor) else column

    return make


def _item_shapes(shapes: _Shapes) -> list[list[int]]:
    return [list(shape[1:]) for shape in shapes for _ in range(shape[0])]


_NUMBERS: Mapping[str, Callable[[_Shapes], npt.ArrayLike]] = {
    "BATCH_ELEMENT_COUNT": lambda shapes: list(map(math.prod, shapes)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes: list(
        itertools.accumulate(map(math.prod, shapes))
    ),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: list(
        itertools.accumulate(map(math.prod, shapes), initial=0)
    ),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes: list(
        itertools.chain.from_iterable(_item_shapes(shapes))
    ),
    # Only its shape has a meaning.
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: np.zeros(max(map(math.prod, shapes))),
}
