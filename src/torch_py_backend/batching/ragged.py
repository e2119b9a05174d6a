"""batch_input and batch_output: ragged inputs in one dimension, and what their shapes tell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.gather_scatter import Batch, Gather, Item, Owned, Value
from torch_py_backend.config.batch_io import BatchInput, Kind
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import OutputError

# The shapes of one input in the requests of a batch, that of the rows included.
_Shapes: TypeAlias = "Sequence[Sequence[int]]"


class Ragged:
    """Gathers and splits batches as Triton's backends in C++ do.

    Values of inputs with `allow_ragged_batch` lie one after another in one dimension, those of one
    request included. Counts are of a request, all its rows together; item shapes are of a row.

    Args:
        config: the model's config, which has batch_input or batch_output.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._flat = {spec.name: _flat for spec in config.inputs if spec.ragged}
        self._made = {one.name: one for one in config.batch_inputs}
        places = {spec.name: place for place, spec in enumerate(config.outputs)}
        rows = (-1,) if config.max_batch_size else ()
        self._split = [
            (
                places[one.name],
                one.name,
                (*rows, *config.outputs[places[one.name]].dims),
                one.source,
            )
            for one in config.batch_outputs
        ]

    def gather(
        self,
        items: Sequence[Item],
        names: Sequence[str],
        _pads: Mapping[str, Gather],
        copied: Collection[str],
    ) -> Batch:
        """The items' values as `batching.gather` has them, but for what is ragged or made."""
        brought = [name for name in names if name not in self._made]
        batch = gather_scatter.gather(items, brought, self._flat, copied)
        columns = iter(batch.columns)
        made = self._made
        return Batch(
            [_make(made[name], items) if name in made else next(columns) for name in names],
            batch.sizes,
        )

    def split(
        self, items: Sequence[Item], made: Sequence[Value | Owned]
    ) -> Sequence[Value | Owned]:
        """The outputs, with each batch output taken apart by the shapes of its source.

        Args:
            items: the items.
            made: the outputs; those that are taken apart have one dimension.

        Raises:
            OutputError: a batch output has not as many values as the shapes say.
        """
        if not self._split:
            return made
        outputs = list(made)
        for place, name, dims, source in self._split:
            shapes = [
                [item[source].shape[axis] if size == -1 else size for axis, size in enumerate(dims)]
                for item in items
            ]
            outputs[place] = Owned(self._parts(name, outputs[place], shapes))
        return outputs

    def _parts(self, name: str, values: Any, shapes: _Shapes) -> list[Value]:
        sizes = [math.prod(shape) for shape in shapes]
        if len(values) != sum(sizes):
            raise OutputError(
                self._model,
                f"output '{name}' has {len(values)} values",
                expected=f"{sum(sizes)}, as batch_output says",
            )
        if isinstance(values, Tensor):
            parts: Sequence[Any] = values.split(sizes)
        else:
            parts = np.split(values, np.cumsum(sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _flat(values: list[Any]) -> Value:
    """Return the values of one input in one dimension; those of one item without a copy."""
    if len(values) == 1:
        return gather_scatter.to_column(values[0].reshape(-1))
    if isinstance(values[0], Tensor):
        return torch.cat([value.reshape(-1) for value in values])
    return gather_scatter.to_column(np.concatenate(values, axis=None))


def _make(one: BatchInput, items: Sequence[Item]) -> Tensor:
    """Return a batch input, on the device that its source is on."""
    values = [item[one.source] for item in items]
    shapes = [value.shape for value in values]
    if one.kind is Kind.MAX_ELEMENT_COUNT_AS_SHAPE:  # its values mean nothing
        numbers = np.zeros(max(map(math.prod, shapes)), dtype=one.dtype.numpy)
    else:
        numbers = np.array(_NUMBERS[one.kind](shapes), dtype=one.dtype.numpy)
    made = torch.from_numpy(numbers)
    return made.to(values[0].device) if isinstance(values[0], Tensor) else made


def _item_shapes(shapes: _Shapes) -> list[list[int]]:
    return [list(shape[1:]) for shape in shapes for _ in range(shape[0])]


_NUMBERS: Mapping[Kind, Callable[[_Shapes], list[Any]]] = {
    Kind.ELEMENT_COUNT: lambda shapes: list(map(math.prod, shapes)),
    Kind.ACCUMULATED_ELEMENT_COUNT: lambda shapes: list(
        itertools.accumulate(map(math.prod, shapes))
    ),
    Kind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: lambda shapes: list(
        itertools.accumulate(map(math.prod, shapes), initial=0)
    ),
    Kind.ITEM_SHAPE: _item_shapes,
    Kind.ITEM_SHAPE_FLATTEN: lambda shapes: list(
        itertools.chain.from_iterable(_item_shapes(shapes))
    ),
}
