"""Row limits: lowered at once when memory runs out, raised slowly."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from torch_py_backend.batching.gather_scatter import Rows
from torch_py_backend.engine import memory_limits
from torch_py_backend.engine.memory_limits import MemoryLimits

SHAPE = ((4,),)


def settle(memory: MemoryLimits, fits: int, rows: int) -> int:
    """Run batches of `rows` rows as the engine does if `fits` rows fit; return the failed calls."""
    failures = 0
    while True:
        most = memory.most(SHAPE)
        called = rows if most is None else min(rows, most)
        if called <= fits:
            memory.fitted(SHAPE, rows)
            return failures
        assert memory.failed(SHAPE, called) is not None
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
    memory = MemoryLimits(rows)
    lowered: list[int | None] = []
    tried: int | None = failed
    while tried is not None:
        tried = memory.failed(SHAPE, tried)
        lowered.append(tried)
    assert lowered == steps


def test_what_fits_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure ever more batches must succeed before a larger call is tried."""
    monkeypatch.setattr(memory_limits, "_PATIENCE", 4)
    memory = MemoryLimits(Rows(1, 32))
    failures = [settle(memory, 8, 32) for _ in range(40)]
    tried = [number for number, count in enumerate(failures) if count]
    assert tried[0] == 0
    assert failures[0] == 2
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    assert gaps == sorted(gaps)
    assert len(tried) <= 5
    assert memory.most(SHAPE) in (8, 16)


def test_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is free again is used step by step, until no limit is left."""
    monkeypatch.setattr(memory_limits, "_PATIENCE", 4)
    memory = MemoryLimits(Rows(1, 32))
    settle(memory, 4, 32)
    limits_before = []
    for _ in range(40):
        limits_before.append(memory.most(SHAPE))
        settle(memory, 32, 32)
    assert limits_before == sorted(limits_before, key=lambda most: most or 99)
    assert {4, 8, 16} <= set(limits_before)
    assert not memory.limits


@pytest.mark.parametrize(
    "rows",
    [Rows(1, 32), Rows(4, None), Rows(4, 8), Rows(4, 8, (4, 8)), Rows(3, 32, (3, 7, 32))],
    ids=str,
)
def test_memory_that_comes_and_goes(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure makes the next call smaller, down to the smallest, however much fits."""
    monkeypatch.setattr(memory_limits, "_PATIENCE", 2)
    random = Random(0)
    memory = MemoryLimits(rows)
    for _ in range(3000):
        size, fits = random.randint(1, 32), random.randint(0, 40)
        called = 10_000
        while True:
            most = memory.most(SHAPE)
            now = rows.filled(min(size, most or size, rows.most or size))
            assert now < called
            if now <= fits:
                memory.fitted(SHAPE, size)
                break
            called = now
            if memory.failed(SHAPE, min(size, most or size)) is None:
                assert now == rows.filled(1)
                break


def test_memory_of_shapes_is_bounded() -> None:
    """Requests of ever new shapes do not use unbounded memory."""
    memory = MemoryLimits(Rows(1, 32))
    for size in range(1000):
        memory.failed(((size,),), 32)
    assert len(memory.limits) == 64
    assert memory.most(((999,),)) == 16


def test_a_row_that_never_fits_is_forgotten() -> None:
    """One request that never fits does not slow down later ones."""
    memory = MemoryLimits(Rows(1, 32))
    memory.failed(SHAPE, 32)
    before = memory.remembered(SHAPE)
    for rows in (16, 8, 4, 2):
        memory.failed(SHAPE, rows)
    memory.restore(SHAPE, before)
    assert memory.most(SHAPE) == 16
    memory.restore(SHAPE, None)
    assert memory.most(SHAPE) is None
    assert not memory.limits
