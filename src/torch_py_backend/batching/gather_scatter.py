"""Items become a batch and a batch becomes outcomes again: group, gather, fit, scatter."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.errors import BackendError

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
# A column of strings: an array of objects.
Strings: TypeAlias = "np.ndarray[Any, np.dtype[np.object_]]"
# In an item numbers may be arrays, too: those are quicker to come by. In a batch they are tensors.
Value: TypeAlias = "Tensor | Array"
# One request's tensors by name, as the client sent them.
Item: TypeAlias = "dict[str, Value]"
# One request's result or its error.
Outcome: TypeAlias = "dict[str, Value] | BackendError"


# A row of a copy that the small rows of a batch share until each is kept, and its number.
Part: TypeAlias = "tuple[Tensor, int]"


class Owned(tuple[Any, ...]):
    """A column, taken apart: for each item its rows in memory of their own, or a `Part`."""

    __slots__ = ()


# Rows below this size are copied at once: to make a tensor of each costs more.
SMALL_BYTES = 1 << 16

# Makes one value of those of several items.
Gather: TypeAlias = "Callable[[list[Any]], Value]"
_NO_PADS: Mapping[str, Gather] = MappingProxyType({})


class Batch(NamedTuple):
    """Gathered columns and the rows that each item brought.

    Attributes:
        columns: one value an input, [rows, ...], in the order asked for.
        sizes: rows of each item, in order; of no meaning where items have no batch dimension.
    """

    columns: Sequence[Value]
    sizes: Sequence[int]


class Rows(NamedTuple):
    """How many rows one call of a model takes.

    A program that was exported with a fixed batch takes least = most.

    Attributes:
        least: the smallest number.
        most: the largest; None: any.
        buckets: the only numbers that it takes, ascending; empty: all between least and most.
    """

    least: int = 1
    most: int | None = None
    buckets: tuple[int, ...] = ()

    def filled(self, rows: int) -> int:
        """What a call of so many rows, at most `most`, is filled up to."""
        if self.buckets:
            return self.buckets[bisect.bisect_left(self.buckets, rows)]
        return max(self.least, rows)

    def take(self, rows: int) -> bool:
        """Whether so many rows are one call as they are."""
        if self.most is not None and rows > self.most:
            return False
        return rows == 0 or self.filled(rows) == rows

    def below(self, rows: int) -> int | None:
        """The next smaller call, about half of one of so many rows; None: there is none."""
        half = rows // 2
        if self.buckets:
            smaller = [size for size in self.buckets if size < rows]
            return max(
                (size for size in smaller if size <= half), default=min(smaller, default=None)
            )
        return max(self.least, half) if self.least < rows else None

    def above(self, rows: int) -> int:
        """The next larger call, at most twice as many rows where no bucket says otherwise."""
        if self.buckets:
            return next((size for size in self.buckets if size > rows), rows)
        return 2 * rows if self.most is None else min(2 * rows, self.most)


ANY_ROWS = Rows()


def gather(
    items: Sequence[Item],
    names: Sequence[str],
    pads: Mapping[str, Gather] = _NO_PADS,
    copied: Collection[str] = (),
) -> Batch:
    """The items' values, concatenated on dimension 0. One item is passed on without a copy.

    Args:
        items: items that agree in everything but their rows, and what is padded.
        names: the values, in the order asked for.
        pads: what gathers those that are padded.
        copied: those of which even one item's is a copy: a model may write into what it is given.
    """
    if len(items) == 1:
        (item,) = items
        columns = [
            pads[name]([item[name]]) if name in pads else to_column(item[name]) for name in names
        ]
        if copied:
            columns = [
                own(one) if name in copied else one
                for name, one in zip(names, columns, strict=True)
            ]
        return Batch(columns, item[names[0]].shape[:1] if names else ())
    sizes = [item[names[0]].shape[0] for item in items]
    join: Gather = _concatenate
    return Batch([pads.get(name, join)([item[name] for item in items]) for name in names], sizes)


def rows_in(columns: Sequence[Value]) -> int:
    """The rows of a batch; 0 where there is no column to tell them."""
    return columns[0].shape[0] if columns and columns[0].ndim else 0


def to_column(value: Value) -> Value:
    """An item's value as batches have it: numbers as a tensor, which shares their memory."""
    if isinstance(value, Tensor) or value.dtype.hasobject:
        return value
    return torch.from_numpy(value)


def _concatenate(values: list[Any]) -> Value:
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    return to_column(np.concatenate(values))


def fit(columns: Sequence[Value], rows: Rows) -> Iterator[tuple[Sequence[Value], int]]:
    """The columns in calls of as many rows as the model takes, each with its rows that count.

    Missing rows repeat the last one: its values are valid.
    """
    total = columns[0].shape[0]
    step = rows.most or max(total, 1)
    for start in range(0, max(total, 1), step):
        present = min(step, total - start)
        piece = [column[start : start + present] for column in columns]
        missing = rows.filled(present) - present
        yield [_fill(column, missing) for column in piece], present


def _fill(column: Value, missing: int) -> Value:
    if missing == 0 or column.shape[0] == 0:
        return column
    last = column[-1:]
    return _concatenate([column, *[last] * missing])


def join(pieces: Sequence[Sequence[Value]]) -> Sequence[Value]:
    """The outputs of several calls, one after another."""
    if len(pieces) == 1:
        return pieces[0]
    return [_concatenate(list(parts)) for parts in zip(*pieces, strict=True)]


def owned(column: Value, sizes: Sequence[int]) -> Owned:
    """Each item's rows of a column: copies, which neither keep the column nor change with it."""
    if len(sizes) <= 1:
        return Owned([own(column)])
    if isinstance(column, Tensor):
        alone = list(sizes).count(1) == len(sizes) == column.shape[0]
        if alone and column.nbytes <= SMALL_BYTES * len(sizes):
            return Owned(zip(itertools.repeat(column.clone()), range(len(sizes)), strict=False))
        copies: list[Tensor] = torch.split_with_sizes_copy(column, list(sizes))  # type: ignore[func-returns-value,assignment]
        return Owned(copies)
    return Owned([own(rows) for rows in _split(column, sizes)])


def taken(owned: Value | Part) -> Value:
    """What an item owns, as a value."""
    if not isinstance(owned, tuple):
        return owned
    column, row = owned
    return column[row : row + 1]


def own(value: Value) -> Value:
    """A copy."""
    return value.clone() if isinstance(value, Tensor) else value.copy()


def wait(values: Iterable[Any]) -> None:
    """Wait for the work on tensors of GPUs, on the current stream of each one's device."""
    for device in {one.device for one in values if isinstance(one, Tensor) and one.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def scatter(
    outputs: Sequence[Value | Owned], names: Sequence[str], sizes: Sequence[int]
) -> list[dict[str, Value]]:
    """Each item's rows of each output: views, contiguous because the outputs are."""
    if len(sizes) <= 1:
        alone = [one[0] if isinstance(one, Owned) else one for one in outputs]
        return [dict(zip(names, alone, strict=True))]
    split = [_split(output, sizes) for output in outputs]
    return [dict(zip(names, rows, strict=True)) for rows in zip(*split, strict=True)]


def _split(output: Value | Owned, sizes: Sequence[int]) -> Sequence[Value]:
    if isinstance(output, Owned):
        return output
    if isinstance(output, Tensor):
        return output.split_with_sizes(list(sizes))
    return np.split(output, np.cumsum(sizes)[:-1])
