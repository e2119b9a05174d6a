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
        alike: whether values can share a batch, which the config does not show.
        key: what the values of a batch have in common.
        gather: makes the column.
    """

    alike: Callable[[Sequence[Value]], bool]
    key: Callable[[Value], Hashable]
    gather: Callable[[Sequence[Value]], Value]


def choose(config: ModelConfig, spec: TensorSpec, pad: Pad | None) -> Shape:
    """Return how the values of an input become a column."""
    if pad is not None:
        return Shape(pad.alike, pad.key, pad.gather)
    if spec.ragged and config.concatenates:
        return Shape(partial(_have_axes, len(spec.dims) + 1), lambda _: None, ragged.flatten)
    # Triton checks fixed dims.
    alike = _have_axes if -1 not in spec.dims else _have_one_shape
    gather = batches.concatenate
    if spec.origin is Origin.STATE:
        gather = _copied
    return Shape(partial(alike, len(spec.dims) + 1), lambda value: value.shape[1:], gather)


def _have_axes(axes: int, values: Sequence[Value]) -> bool:
    for value in values:  # noqa: SIM110  a generator costs a call for each
        # Triton drops the batch dimension of a request whose shape says 0 rows.
        if value.ndim != axes:
            return False
    return True


def _have_one_shape(axes: int, values: Sequence[Value]) -> bool:
    dims = values[0].shape[1:]
    for value in values:  # noqa: SIM110
        if value.ndim != axes or value.shape[1:] != dims:
            return False
    return True


def _copied(values: Sequence[Value]) -> Value:
    """Return a column that the model may write to: it keeps the states."""
    column = batches.concatenate(values)
    return clone(column) if len(values) == 1 else column
