"""The values that requests and batches are made of: tensors of torch, and arrays of numpy."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.errors import BackendError

# A column of strings: an array of objects.
Strings: TypeAlias = "np.ndarray[Any, np.dtype[np.object_]]"
# Numbers of an item may be arrays, which are cheaper to create. Those of a batch are tensors.
Value: TypeAlias = "Tensor | np.ndarray[Any, np.dtype[Any]]"
# One request's tensors by name, as sent by the client.
Item: TypeAlias = "dict[str, Value]"
Items: TypeAlias = "Sequence[Item]"
# Those of a batch, by place.
Columns: TypeAlias = "Sequence[Value]"
# One request's result or its error.
Outcome: TypeAlias = "dict[str, Value] | BackendError"
# What users' functions take and return: trees of anything.
Tree: TypeAlias = Any
# Calls a model, or another function of a user.
Call: TypeAlias = "Callable[..., Tree]"
# Values that a client sends in addition to its tensors.
Parameters: TypeAlias = "Mapping[str, str | int | float | bool]"
_NO_PARAMETERS: Parameters = MappingProxyType({})
_NO_CONTEXT = contextlib.nullcontext()


class Rows(NamedTuple):
    """How many rows one call of a model takes: from `least` to `most`, if there is a limit.

    A fixed batch size has least = most. If there are `buckets`, ascending, only they are allowed.
    """

    least: int = 1
    most: int | None = None
    buckets: tuple[int, ...] = ()

    def filled(self, rows: int) -> int:
        """Return the size that a call of `rows` rows, at most `most`, is filled up to."""
        if self.buckets:
            return self.buckets[bisect.bisect_left(self.buckets, rows)]
        return max(self.least, rows)

    def accept(self, rows: int) -> bool:
        """Return whether `rows` rows are one call without filling."""
        if self.most is not None and rows > self.most:
            return False
        return rows == 0 or (rows in self.buckets if self.buckets else rows >= self.least)


ANY_ROWS = Rows()


class Step(NamedTuple):
    """A request's place in its sequence; with an ID of 0, or an empty one, it only fills a slot."""

    id: int | str
    starts: bool = False
    ends: bool = False
    error: BackendError | None = None  # why the request cannot be read; its item is then empty


_NO_STEP = Step(0)


class RequestItem(dict[str, Value]):
    """An item with what its request has beside tensors.

    `context` returns a context manager for its trace context; None: Triton does not trace it.
    """

    __slots__ = ("context", "parameters", "step")

    def __init__(
        self,
        item: Mapping[str, Value],
        context: Callable[[], AbstractContextManager[object]] | None = None,
        parameters: Parameters = _NO_PARAMETERS,
        step: Step = _NO_STEP,
    ) -> None:
        super().__init__(item)
        self.context, self.parameters, self.step = context, parameters, step

    def __or__(self, other: Mapping[str, Value]) -> RequestItem:  # type: ignore[override]
        """Return the item with other values, such as the state of a sequence."""
        return RequestItem({**self, **other}, self.context, self.parameters, self.step)


def step(item: Item | BackendError) -> Step:
    """Return the place of an item's request in its sequence."""
    return item.step if isinstance(item, RequestItem) else _NO_STEP


def parameters(item: Item) -> Parameters:
    return item.parameters if isinstance(item, RequestItem) else _NO_PARAMETERS


def trace_context(items: Sequence[object]) -> AbstractContextManager[object]:
    """Return the context of the first item of a traced request; an empty one without any."""
    for item in items:
        if isinstance(item, RequestItem) and item.context is not None:
            return item.context()
    return _NO_CONTEXT


def on_gpu(item: Item) -> bool:
    """Return whether all numbers of an item are on a GPU; false if it has none."""
    tensors = [value for value in item.values() if isinstance(value, Tensor)]
    return bool(tensors) and all(tensor.is_cuda for tensor in tensors)


def to_column(value: Value) -> Value:
    """Convert an item's value to a column: numbers to a tensor that shares their memory."""
    if isinstance(value, Tensor) or value.dtype.hasobject:
        return value
    return torch.from_numpy(value)


def on_host(value: Value) -> Value:
    return value.cpu() if isinstance(value, Tensor) else value


def clone(value: Value) -> Value:
    return value.clone() if isinstance(value, Tensor) else value.copy()


def objects(values: Iterable[object]) -> Strings:
    """Return a column with one value of any type per row."""
    rows = list(values)
    column: Strings = np.empty(len(rows), dtype=np.object_)
    for place, row in enumerate(rows):  # numpy would look into a list of arrays
        column[place] = row
    return column
