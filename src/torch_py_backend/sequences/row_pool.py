"""Tables with a row for each holder, written for a whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from torch_py_backend.batching.gather_scatter import Item

# The shape of the rows, the dtype and the device of each table.
Form: TypeAlias = "tuple[tuple[torch.Size, torch.dtype, torch.device], ...]"

_MIN_ROWS = 64
# Values are written as integers of the same size, by size in bytes: torch's index_copy_() takes
# neither unsigned integers of 16 bits and more nor floats of 8 bits.
_WRITTEN_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Holder(Protocol):
    """An object with a row in a pool.

    Attributes:
        slot: the row's number.
        values: views of the row in each table, [1, ...], by names.
    """

    slot: int
    values: Item


class Pool:
    """Tables that double when full, and shrink when three quarters of the holders are gone.

    Attributes:
        form: the form of the tables.

    Args:
        columns: a column for each table, with the form of the columns to write.
    """

    def __init__(self, names: Sequence[str], columns: Sequence[Tensor]) -> None:
        self.form = form(columns)
        self._names = tuple(names)
        self._tables = [column.new_empty((0, *column.shape[1:])) for column in columns]
        self._holders: dict[int, Holder] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._tables[0].shape[0]

    def add(self, holder: Holder) -> None:
        """Assign a row to a holder. The row must be written before it is read."""
        if not self._free:
            self._resize(max(_MIN_ROWS, 2 * len(self)))
        slot = self._free.pop()
        self._holders[slot] = holder
        self._place(holder, slot)

    def remove(self, holder: Holder) -> None:
        """Free a holder's row."""
        del self._holders[holder.slot]
        self._free.append(holder.slot)
        holder.slot = -1

    def write(
        self, holders: Sequence[Holder], columns: Sequence[Tensor], rows: Sequence[int]
    ) -> None:
        """Write rows of columns, one column for each table, to the holders' rows."""
        device = columns[0].device
        slots = torch.tensor([holder.slot for holder in holders], device=device)
        if len(rows) < columns[0].shape[0]:
            indices = torch.tensor(rows, device=device)
            columns = [column.index_select(0, indices) for column in columns]
        for table, column in zip(self._tables, columns, strict=True):
            dtype = _WRITTEN_AS.get(table.itemsize, table.dtype)
            table.view(dtype).index_copy_(0, slots, column.view(dtype))

    def trim(self) -> None:
        """Shrink the tables if most holders are gone."""
        if len(self) > _MIN_ROWS and 4 * len(self._holders) <= len(self):
            self._resize(max(_MIN_ROWS, 2 * len(self._holders)))

    def _resize(self, rows: int) -> None:
        before = self._holders
        slots = torch.tensor(list(before), dtype=torch.int64, device=self._tables[0].device)
        tables = []
        for table in self._tables:
            resized = table.new_empty((rows, *table.shape[1:]))
            resized[: len(before)] = table.index_select(0, slots)
            tables.append(resized)
        self._tables = tables
        self._holders = dict(enumerate(before.values()))
        for slot, holder in self._holders.items():
            self._place(holder, slot)
        self._free = list(range(rows - 1, len(before) - 1, -1))

    def _place(self, holder: Holder, slot: int) -> None:
        holder.slot = slot
        views = (table[slot : slot + 1] for table in self._tables)
        holder.values = dict(zip(self._names, views, strict=True))


def form(columns: Sequence[Tensor]) -> Form:
    """Return the form of columns; only columns of equal forms share a pool."""
    return tuple((column.shape[1:], column.dtype, column.device) for column in columns)
