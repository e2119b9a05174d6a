"""batch_input and batch_output: flatten ragged inputs, create batch inputs, split batch outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.gather_scatter import Batch, Item, ItemRows, Value
from torch_py_backend.config.batch_io import BatchInputKind
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import OutputError, counted

# The shapes of one input in the requests of a batch, including rows.
_Shapes: TypeAlias = "Sequence[Sequence[int]]"


class Ragged:
    """Gathers and splits batches as Triton's C++ backends do.

    Values of inputs with `allow_ragged_batch` are concatenated in one dimension, those of a single
    request included. Element counts are for a whole request, item shapes for one row.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._flat = {spec.name: _flat for spec in config.inputs if spec.ragged}
        self._batch_inputs = {batch_input.name: batch_input for batch_input in config.batch_inputs}
        places = {spec.name: place for place, spec in enumerate(config.outputs)}
        rows = (-1,) if config.max_batch_size else ()
        self._split = [
            (
                places[output.name],
                output.name,
                (*rows, *config.outputs[places[output.name]].dims),
                output.source,
            )
            for output in config.batch_outputs
        ]

    def gather(
        self,
        items: Sequence[Item],
        names: Sequence[str],
        copied: Collection[str] = (),
    ) -> Batch:
        """Gather as `gather_scatter.gather` does; flatten ragged inputs, create batch inputs."""
        sent = [name for name in names if name not in self._batch_inputs]
        batch = gather_scatter.gather(items, sent, self._flat, copied)
        columns = dict(zip(sent, batch.columns, strict=True))
        for name in names:
            batch_input = self._batch_inputs.get(name)
            if batch_input is not None:
                values = [item[batch_input.source] for item in items]
                numbers = _NUMBERS[batch_input.kind]([value.shape for value in values])
                column = torch.from_numpy(np.array(numbers, dtype=batch_input.dtype.numpy))
                source = values[0]
                columns[name] = column.to(source.device) if isinstance(source, Tensor) else column
        return Batch([columns[name] for name in names], batch.sizes)

    def split(
        self, items: Sequence[Item], outputs: Sequence[Value | ItemRows]
    ) -> Sequence[Value | ItemRows]:
        """Split each batch output by the shapes of its source.

        Raises:
            OutputError: the number of values of a batch output contradicts the shapes.
        """
        if not self._split:
            return outputs
        outputs = list(outputs)
        for place, name, dims, source in self._split:
            shapes = [
                [item[source].shape[axis] if size == -1 else size for axis, size in enumerate(dims)]
                for item in items
            ]
            sizes = [math.prod(shape) for shape in shapes]
            values: Any = outputs[place]
            if len(values) != sum(sizes):
                raise OutputError(
                    self._model,
                    f"output '{name}' has {counted(len(values), 'value')}",
                    expected=f"{sum(sizes)}, as batch_output says",
                )
            parts = zip(gather_scatter.split(values, sizes), shapes, strict=True)
            outputs[place] = ItemRows(part.reshape(shape) for part, shape in parts)
        return outputs


def _flat(values: list[Any]) -> Value:
    """Concatenate the values of one input in one dimension; do not copy those of a single item."""
    if len(values) == 1:
        return gather_scatter.to_column(values[0].reshape(-1))
    if isinstance(values[0], Tensor):
        return torch.cat([value.reshape(-1) for value in values])
    return gather_scatter.to_column(np.concatenate(values, axis=None))


def _item_shapes(shapes: _Shapes) -> list[list[int]]:
    return [list(shape[1:]) for shape in shapes for _ in range(shape[0])]


_NUMBERS: Mapping[BatchInputKind, Callable[[_Shapes], npt.ArrayLike]] = {
    BatchInputKind.ELEMENT_COUNT: lambda shapes: list(map(math.prod, shapes)),
    BatchInputKind.ACCUMULATED_ELEMENT_COUNT: lambda shapes: list(
        itertools.accumulate(map(math.prod, shapes))
    ),
    BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: lambda shapes: list(
        itertools.accumulate(map(math.prod, shapes), initial=0)
    ),
    BatchInputKind.ITEM_SHAPE: _item_shapes,
    BatchInputKind.ITEM_SHAPE_FLATTEN: lambda shapes: list(
        itertools.chain.from_iterable(_item_shapes(shapes))
    ),
    # Only its shape has a meaning.
    BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE: lambda shapes: np.zeros(max(map(math.prod, shapes))),
}
