"""Row limits: lowered at once when memory runs out, raised slowly."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from torch_py_backend.batching.gather_scatter import Rows
from torch_py_backend.engine import memory_limits
from torch_py_backend.engine.memory_limits import MemoryLimits

SHAPE = ((4,),)


def settle(made: MemoryLimits, fits: int, rows: int) -> int:
    """Run batches of `rows` rows as the engine does if `fits` rows fit; return the failed calls."""
    failures = 0
    while True:
        most = made.most(SHAPE)
        called = rows if most is None else min(rows, most)
        if called <= fits:
            made.fitted(SHAPE, rows)
            return failures
        assert made.failed(SHAPE, called) is not None
        failures += 1


@pytest.mark.parametrize(
    ("rows", "failed", "steps"),
    [
        pytest.param(Rows(1, 32), 7, [3, 1, None], id="odd"),
        pytest.param(Rows(1, 8), 20, [4, 2, 1, None], id="called in pieces of eight"),
        pytest.param(Rows(4, 4), 2, [None], id="fixed, filled up"),
        pytest.param(Rows(3, 32), 8, [4, 3, None], id="at least three"),
        pytest.param(Rows(1, 8, (1, 2, 4, 8)), 3, [2, 1, None], id="filled up to a bucket"),
        pytest.param(Rows(6, 8, (6, 8)), 8, [6, None], id="a bucket above the half"),
    ],
)
def test_steps_down(rows: Rows, failed: int, steps: list[int | None]) -> None:
    """Each failure halves the rows of a call, down to the smallest possible call."""
    made = MemoryLimits(rows)
    found: list[int | None] = []
    tried: int | None = failed
    while tried is not None:
        tried = made.failed(SHAPE, tried)
        found.append(tried)
    assert found == steps


def test_what_fits_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure ever more batches must succeed before a larger call is tried."""
    monkeypatch.setattr(memory_limits, "_PATIENCE", 4)
    made = MemoryLimits(Rows(1, 32))
    failures = [settle(made, 8, 32) for _ in range(40)]
    tried = [number for number, count in enumerate(failures) if count]
    assert tried[0] == 0
    assert failures[0] == 2
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    assert gaps == sorted(gaps)
    assert len(tried) <= 5
    assert made.most(SHAPE) in (8, 16)


def test_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is free again is used step by step, until no limit is left."""
    monkeypatch.setattr(memory_limits, "_PATIENCE", 4)
    made = MemoryLimits(Rows(1, 32))
    settle(made, 4, 32)
    seen = []
    for _ in range(40):
        seen.append(made.most(SHAPE))
        settle(made, 32, 32)
    assert seen == sorted(seen, key=lambda most: most or 99)
    assert {4, 8, 16} <= set(seen)
    assert not made.limits


@pytest.mark.parametrize(
    "rows",
    [Rows(1, 32), Rows(4, None), Rows(4, 8), Rows(4, 8, (4, 8)), Rows(3, 32, (3, 7, 32))],
    ids=str,
)
def test_memory_that_comes_and_goes(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure makes the next call smaller, down to the smallest, however much fits."""
    monkeypatch.setattr(memory_limits, "_PATIENCE", 2)
    random = Random(0)
    made = MemoryLimits(rows)
    for _ in range(3000):
        size, fits = random.randint(1, 32), random.randint(0, 40)
        called = 10_000
        while True:
            most = made.most(SHAPE)
            now = rows.filled(min(size, most or size, rows.most or size))
            assert now < called
            if now <= fits:
                made.fitted(SHAPE, size)
                break
            called = now
            if made.failed(SHAPE, min(size, most or size)) is None:
                assert now == rows.filled(1)
                break


def test_memory_of_shapes_is_bounded() -> None:
    """Requests of ever new shapes do not use unbounded memory."""
    made = MemoryLimits(Rows(1, 32))
    for size in range(1000):
        made.failed(((size,),), 32)
    assert len(made.limits) == 64
    assert made.most(((999,),)) == 16


def test_a_row_that_never_fits_is_forgotten() -> None:
    """One request that never fits does not slow down later ones."""
    made = MemoryLimits(Rows(1, 32))
    made.failed(SHAPE, 32)
    before = made.remembered(SHAPE)
    for rows in (16, 8, 4, 2):
        made.failed(SHAPE, rows)
    made.restore(SHAPE, before)
    assert made.most(SHAPE) == 16
    made.restore(SHAPE, None)
    assert made.most(SHAPE) is None
    assert not made.limits
