"""Rows of one form in tables, a row for each holder: read and written for a whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from torch_py_backend.batching.gather_scatter import Item

# What tables have in common: of each its rows' shape, its type and its device.
Form: TypeAlias = "tuple[tuple[torch.Size, torch.dtype, torch.device], ...]"

_LEAST = 64


class Holder(Protocol):
    """Who has a row in a pool.

    Attributes:
        slot: the row's number.
        values: views of the row in each table, [1, ...], by names.
    """

    slot: int
    values: Item


class Pool:
    """Tables that double when they are full, and shrink when three of four holders are gone.

    Attributes:
        form: that of its rows.

    Args:
        names: of the tables.
        columns: one for each, as those that rows will be written from.
    """

    def __init__(self, names: Sequence[str], columns: Sequence[Tensor]) -> None:
        self.form = form(columns)
        self._names = tuple(names)
        self._tables = [column.new_empty((0, *column.shape[1:])) for column in columns]
        self._holders: dict[int, Holder] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        """How many holders there are room for."""
        return self._tables[0].shape[0]

    def enter(self, holder: Holder) -> None:
        """Give a row to a holder, which writes it before anyone reads it."""
        if not self._free:
            self._resize(max(_LEAST, 2 * len(self)))
        slot = self._free.pop()
        self._holders[slot] = holder
        self._place(holder, slot)

    def leave(self, holder: Holder) -> None:
        """Take a holder's row back."""
        del self._holders[holder.slot]
        self._free.append(holder.slot)
        holder.slot = -1

    def write(
        self, holders: Sequence[Holder], columns: Sequence[Tensor], rows: Sequence[int]
    ) -> None:
        """Put rows of columns, one of each table's form, into the holders' own."""
        device = columns[0].device
        into = torch.tensor([one.slot for one in holders], device=device)
        if len(rows) < columns[0].shape[0]:
            picked = torch.tensor(rows, device=device)
            columns = [column.index_select(0, picked) for column in columns]
        for table, column in zip(self._tables, columns, strict=True):
            table.index_copy_(0, into, column)

    def trim(self) -> None:
        """Give memory back that most holders have left."""
        if len(self) > _LEAST and 4 * len(self._holders) <= len(self):
            self._resize(max(_LEAST, 2 * len(self._holders)))

    def _resize(self, rows: int) -> None:
        held = self._holders
        picked = torch.tensor(list(held), dtype=torch.int64, device=self._tables[0].device)
        tables = []
        for table in self._tables:
            wider = table.new_empty((rows, *table.shape[1:]))
            wider[: len(held)] = table.index_select(0, picked)
            tables.append(wider)
        self._tables = tables
        self._holders = dict(enumerate(held.values()))
        for slot, holder in self._holders.items():
            self._place(holder, slot)
        self._free = list(range(rows - 1, len(held) - 1, -1))

    def _place(self, holder: Holder, slot: int) -> None:
        holder.slot = slot
        views = (table[slot : slot + 1] for table in self._tables)
        holder.values = dict(zip(self._names, views, strict=True))


def form(columns: Sequence[Tensor]) -> Form:
    """What columns of a batch have in common with those of another."""
    return tuple((column.shape[1:], column.dtype, column.device) for column in columns)
