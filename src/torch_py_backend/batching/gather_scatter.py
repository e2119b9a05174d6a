"""Gather items into a batch, fit it to the model's row counts, scatter its outputs to items."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import BackendError, ConfigError

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
# A column of strings: an array of objects.
Strings: TypeAlias = "np.ndarray[Any, np.dtype[np.object_]]"
# Numbers of an item may be arrays, which are cheaper to create. Those of a batch are tensors.
Value: TypeAlias = "Tensor | Array"
# One request's tensors by name, as sent by the client.
Item: TypeAlias = "dict[str, Value]"
# One request's result or its error.
Outcome: TypeAlias = "dict[str, Value] | BackendError"


class ItemRows(tuple[Any, ...]):
    """A column split by items: each item's rows, as a copy."""

    __slots__ = ()


# Combines the values of several items into one.
Gather: TypeAlias = "Callable[[list[Value]], Value]"
_NO_PADS: Mapping[str, Gather] = MappingProxyType({})


class Batch(NamedTuple):
    """Gathered columns and the number of rows of each item.

    Attributes:
        columns: one value for each input, [rows, ...], in the order of the requested names.
        sizes: the rows of each item, in order; meaningless if items have no batch dimension.
    """

    columns: Sequence[Value]
    sizes: Sequence[int]


class Rows(NamedTuple):
    """How many rows one call of a model takes.

    A program that was exported with a fixed batch size has least = most.

    Attributes:
        least: the smallest number.
        most: the largest number; None: no limit.
        buckets: the only allowed numbers, ascending; empty: all from least to most.
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


def row_counts(config: ModelConfig, accepted: Rows, *, fixed: bool) -> Rows:
    """Return how many rows calls have.

    Args:
        config: the model's config.
        accepted: the rows that the artifact accepts.
        fixed: whether each row count is prepared separately, as with static shapes.

    Raises:
        ConfigError: the artifact accepts none of the buckets.
    """
    if not config.max_batch_size or config.concatenates:
        return ANY_ROWS
    # The least rows of a program may exceed max_batch_size: its batches are padded.
    most = max(accepted.least, min(accepted.most or config.max_batch_size, config.max_batch_size))
    buckets = config.options.batch_buckets
    if buckets is None:
        buckets = powers_of_two(most) if fixed else ()
    usable = tuple(size for size in buckets if accepted.least <= size <= most)
    if buckets and not usable:
        raise ConfigError(
            config.name,
            f"BATCH_BUCKETS is {', '.join(map(str, buckets))}",
            expected=f"row counts among {accepted.least} to {most}, which the model takes",
        )
    return Rows(usable[0], usable[-1], usable) if usable else Rows(accepted.least, most)


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and the number itself, so that less than half of a call is padding."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)


def gather(
    items: Sequence[Item],
    names: Sequence[str],
    pads: Mapping[str, Gather] = _NO_PADS,
    copied: Collection[str] = (),
) -> Batch:
    """Concatenate the items' values on dimension 0. A single item is passed on without a copy.

    Args:
        items: items with the same shapes except for rows and padded dimensions.
        names: the values to gather, in order.
        pads: the functions that gather padded inputs.
        copied: inputs to copy even for a single item, because a model may write to its inputs.
    """
    if len(items) == 1:
        (item,) = items
        columns = []
        for name in names:
            column = pads[name]([item[name]]) if name in pads else to_column(item[name])
            columns.append(clone(column) if name in copied else column)
        return Batch(columns, item[names[0]].shape[:1] if names else ())
    sizes = [item[names[0]].shape[0] for item in items]
    join: Gather = _concatenate
    return Batch([pads.get(name, join)([item[name] for item in items]) for name in names], sizes)


def numbers(names: Sequence[str]) -> Callable[[Sequence[Item]], tuple[list[Tensor], list[int]]]:
    """Return a function that gathers as `gather` does, for arrays of numbers in few calls."""
    concatenate, from_numpy = np.concatenate, torch.from_numpy
    first = names[0]

    def gather_numbers(items: Sequence[Any]) -> tuple[list[Tensor], list[int]]:
        sizes = [item[first].shape[0] for item in items]
        if len(items) == 1:
            (item,) = items
            return [from_numpy(item[name]) for name in names], sizes
        return [from_numpy(concatenate([item[name] for item in items])) for name in names], sizes

    return gather_numbers


def to_column(value: Value) -> Value:
    """Convert an item's value to a column: numbers to a tensor that shares their memory."""
    if isinstance(value, Tensor) or value.dtype.hasobject:
        return value
    return torch.from_numpy(value)


def _concatenate(values: list[Any]) -> Value:
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    return to_column(np.concatenate(values))


def fit(columns: Sequence[Value], rows: Rows) -> Iterator[tuple[Sequence[Value], int]]:
    """Split columns into calls of as many rows as the model takes.

    Rows are filled up by repeating the last one, whose values are valid.

    Yields:
        The columns of a call and the number of its rows that are not filling.
    """
    total = columns[0].shape[0]
    step = rows.most or max(total, 1)
    for start in range(0, max(total, 1), step):
        present = min(step, total - start)
        piece = [column[start : start + present] for column in columns]
        missing = rows.filled(present) - present
        if missing and present:
            piece = [_concatenate([column, *[column[-1:]] * missing]) for column in piece]
        yield piece, present


def join(pieces: Sequence[Sequence[Value]]) -> Sequence[Value]:
    """Concatenate the outputs of several calls."""
    if len(pieces) == 1:
        return pieces[0]
    return [_concatenate(list(parts)) for parts in zip(*pieces, strict=True)]


def clone_rows(column: Value, sizes: Sequence[int]) -> ItemRows:
    """Split a column into copies of each item's rows, independent of the column's memory."""
    parts = split(column, sizes) if len(sizes) > 1 else [column]
    return ItemRows([clone(rows) for rows in parts])


def clone(value: Value) -> Value:
    """Return a copy of a value."""
    return value.clone() if isinstance(value, Tensor) else value.copy()


def scatter(
    outputs: Sequence[Value | ItemRows], names: Sequence[str], sizes: Sequence[int]
) -> list[dict[str, Value]]:
    """Return each item's rows of each output as views; contiguous, as the outputs are."""
    if len(sizes) <= 1:
        values = [output[0] if isinstance(output, ItemRows) else output for output in outputs]
        return [dict(zip(names, values, strict=True))]
    parts = [split(output, sizes) for output in outputs]
    return [dict(zip(names, rows, strict=True)) for rows in zip(*parts, strict=True)]


def split(output: Value | ItemRows, sizes: Sequence[int]) -> Sequence[Value]:
    """Return each item's rows of an output as a view."""
    if isinstance(output, ItemRows):
        return output
    if isinstance(output, Tensor):
        return output.split_with_sizes(list(sizes))
    return np.split(output, np.cumsum(sizes)[:-1])
