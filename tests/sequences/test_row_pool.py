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


def made() -> Pool:
    return Pool(("a", "b"), columns(0))


def test_rows_are_written_and_read() -> None:
    """A new holder gets a row, which can be written from any row of a batch."""
    pool = made()
    holders = [Holder() for _ in range(3)]
    for one in holders:
        pool.enter(one)

    pool.write(holders, columns(5, 6, 7), [0, 1, 2])
    pool.write(holders[:2], columns(1, 2, 3, 4), [3, 1])

    assert [one.read() for one in holders] == [([4, 4], [4]), ([2, 2], [2]), ([7, 7], [7])]


def test_what_is_written_is_copied() -> None:
    """Rows do not change when the batch they were written from changes."""
    pool, holder, batch = made(), Holder(), columns(5)
    pool.enter(holder)
    pool.write([holder], batch, [0])

    for column in batch:
        column.zero_()

    assert holder.read() == ([5, 5], [5])


def test_forms() -> None:
    """Columns with another shape, apart from rows, or another type have another form."""
    forms = {row_pool.form(one) for one in (columns(1), columns(1, 2), columns(3)[::-1])}
    forms.add(row_pool.form([one.double() for one in columns(1)]))

    assert len(forms) == 3


def test_tables_shrink() -> None:
    """Tables shrink when three quarters of the holders are gone; the others keep their values."""
    pool = made()
    holders = [Holder() for _ in range(300)]
    for number, one in enumerate(holders):
        pool.enter(one)
        pool.write([one], columns(number), [0])
    assert len(pool) == 512
    for one in holders[10:]:
        pool.leave(one)

    pool.trim()

    assert len(pool) == 64
    assert [one.read()[1] for one in holders[:10]] == [[number] for number in range(10)]


@given(st.lists(st.sampled_from(["enter", "leave", "write", "trim"]), max_size=60), st.randoms())
def test_rows_are_not_mixed_up(events: list[str], random: Random) -> None:
    """In any order of entering, leaving and writing, each holder reads what it wrote last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_pool, "_LEAST", 2)
        pool = made()
        written: dict[Holder, int] = {}
        for number, event in enumerate(events):
            holders = list(written)
            if event == "enter":
                one = Holder()
                pool.enter(one)
                pool.write([one], columns(number), [0])
                written[one] = number
            elif event == "leave" and holders:
                one = random.choice(holders)
                pool.leave(one)
                del written[one]
            elif event == "write" and holders:
                some = random.sample(holders, random.randint(1, len(holders)))
                pool.write(some, columns(*range(number, number + len(some))), range(len(some)))
                written |= {one: number + place for place, one in enumerate(some)}
            elif event == "trim":
                pool.trim()
            assert {one: one.read()[1] for one in written} == {
                one: [value] for one, value in written.items()
            }
