"""How the values of an input in several items become one column: concatenated, padded or flat."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.pipeline import batches, ragged
from torch_py_backend.pipeline.padding import Pad
from torch_py_backend.values import Value, clone


class Shape(NamedTuple):
    """How the values of an input in several items become one column.

    Attributes:
        rows: the rows of each value; None: they cannot share a batch.
        key: what the values of a batch have in common.
        gather: makes the column.
    """

    rows: Callable[[Sequence[Value]], list[int] | None]
    key: Callable[[Value], Hashable]
    gather: Callable[[Sequence[Value]], Value]


def choose(config: ModelConfig, spec: TensorSpec, pad: Pad | None) -> Shape:
    """Return how the values of an input become a column."""
    if not config.max_batch_size:  # a call has one item, which counts as one row
        gather = ragged.flatten if spec.ragged and config.concatenates else batches.concatenate
        return Shape(_one_row, lambda _: None, _copied if spec.origin is Origin.STATE else gather)
    if pad is not None:
        return Shape(pad.rows, pad.key, pad.gather)
    if spec.ragged and config.concatenates:
        return Shape(partial(_rows_of_fixed, len(spec.dims) + 1), lambda _: None, ragged.flatten)
    rows = _rows_of_fixed if -1 not in spec.dims else _rows_of_equal
    gather = _copied if spec.origin is Origin.STATE else batches.concatenate
    return Shape(partial(rows, len(spec.dims) + 1), lambda value: value.shape[1:], gather)


def _one_row(values: Sequence[Value]) -> list[int] | None:
    return [1] if len(values) == 1 else None


def _rows_of_fixed(axes: int, values: Sequence[Value]) -> list[int] | None:
    """Return the rows of values whose dims Triton has checked."""
    rows = []
    for value in values:
        shape = value.shape
        # Triton drops the batch dimension of a request whose shape says 0 rows.
        if len(shape) != axes:
            return None
        rows.append(shape[0])
    return rows


def _rows_of_equal(axes: int, values: Sequence[Value]) -> list[int] | None:
    dims = values[0].shape[1:]
    if any(value.shape[1:] != dims for value in values):
        return None
    return _rows_of_fixed(axes, values)


def _copied(values: Sequence[Value]) -> Value:
    """Return a column that the model may write to: it keeps the states."""
    column = batches.concatenate(values)
    return clone(column) if len(values) == 1 else column
