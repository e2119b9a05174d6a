"""The row pool: tables that grow and shrink."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_py_backend.batching.gather_scatter import Item
from torch_py_backend.sequences import row_pool
from torch_py_backend.sequences.row_pool import Pool


class Holder:
    """An object with a row."""

    def __init__(self) -> None:
        self.slot = -1
        self.values: Item = {}

    def read(self) -> tuple[list[float], list[int]]:
        a, b = torch.as_tensor(self.values["a"]), torch.as_tensor(self.values["b"])
        assert a.shape == (1, 2)
        assert b.shape == (1,)
        return a[0].tolist(), b.tolist()


def columns(*values: int) -> list[Tensor]:
    """Return a row for each value, of two tables."""
    numbers = torch.tensor(values, dtype=torch.int64)
    return [numbers[:, None].expand(-1, 2).float().contiguous(), numbers]


def pool_of_two() -> Pool:
    return Pool(("a", "b"), columns(0))


def test_written_rows_are_copies() -> None:
    """Rows do not change when the batch they were written from changes."""
    pool, holder, batch = pool_of_two(), Holder(), columns(5)
    pool.add(holder)
    pool.write([holder], batch, [0])
    for column in batch:
        column.zero_()
    assert holder.read() == ([5, 5], [5])


def test_forms() -> None:
    """Columns with another shape, apart from rows, or another type have another form."""
    forms = {row_pool.form(each) for each in (columns(1), columns(1, 2), columns(3)[::-1])}
    forms.add(row_pool.form([column.double() for column in columns(1)]))
    assert len(forms) == 3


def test_tables_shrink() -> None:
    """Tables shrink when three quarters of the holders are gone; the others keep their values."""
    pool = pool_of_two()
    holders = [Holder() for _ in range(300)]
    for number, holder in enumerate(holders):
        pool.add(holder)
        pool.write([holder], columns(number), [0])
    assert len(pool) == 512
    for holder in holders[10:]:
        pool.remove(holder)
    pool.trim()
    assert len(pool) == 64
    assert [holder.read()[1] for holder in holders[:10]] == [[number] for number in range(10)]


@given(st.lists(st.sampled_from(["enter", "leave", "write", "trim"]), max_size=60), st.randoms())
def test_rows_are_not_mixed_up(events: list[str], random: Random) -> None:
    """In any order of entering, leaving and writing, each holder reads what it wrote last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_pool, "_MIN_ROWS", 2)
        pool = pool_of_two()
        written: dict[Holder, int] = {}
        for number, event in enumerate(events):
            holders = list(written)
            if event == "enter":
                holder = Holder()
                pool.add(holder)
                pool.write([holder], columns(number), [0])
                written[holder] = number
            elif event == "leave" and holders:
                holder = random.choice(holders)
                pool.remove(holder)
                del written[holder]
            elif event == "write" and holders:
                some = random.sample(holders, random.randint(1, len(holders)))
                pool.write(some, columns(*range(number, number + len(some))), range(len(some)))
                written |= {holder: number + place for place, holder in enumerate(some)}
            elif event == "trim":
                pool.trim()
            assert {holder: holder.read() for holder in written} == {
                holder: ([value, value], [value]) for holder, value in written.items()
            }
