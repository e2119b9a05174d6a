"""Bisection: exactly the failing items get the error, at bounded cost."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from torch_py_backend.engine.bisection import bisect


@dataclass(frozen=True)
class Failed:
    """A failure with the items of its call."""

    items: tuple[int, ...]


class Model:
    """Fails for every batch that has one of the guilty items."""

    def __init__(self, guilty: Sequence[int]) -> None:
        self.guilty = set(guilty)
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, items: Sequence[int]) -> list[str] | Failed:
        self.calls.append(tuple(items))
        if self.guilty & set(items):
            return Failed(tuple(items))
        return [f"answer {item}" for item in items]


def bisected(model: Model, count: int, calls: int = 1000) -> list[str | Failed]:
    items = range(count)
    return bisect(items, model, Failed(tuple(items)), hopeless=lambda: False, calls=calls)


@pytest.mark.parametrize(("count", "failing"), [(2, 1), (3, 3), (7, 2), (32, 1), (32, 16), (33, 2)])
def test_only_failing_items_get_the_error(count: int, failing: int) -> None:
    """Every other item gets its result; each failing item gets the failure of its own call."""
    guilty = random.Random(count).sample(range(count), failing)
    model = Model(guilty)
    results = bisected(model, count)
    assert results == [
        Failed((item,)) if item in guilty else f"answer {item}" for item in range(count)
    ]
    assert len(model.calls) <= 2 * count - 2
    assert len(model.calls) <= 2 * len(guilty) * math.ceil(math.log2(count))


def test_failure_that_depends_on_the_batch() -> None:
    """If both halves succeed, all items get their results."""
    model = Model([])
    assert bisected(model, 4) == [f"answer {item}" for item in range(4)]
    assert model.calls == [(0, 1), (2, 3)]


@pytest.mark.parametrize(("calls", "answered"), [(0, 0), (1, 0), (3, 4), (7, 7)])
def test_work_is_bounded(calls: int, answered: int) -> None:
    """After the last call all undecided items fail; the largest parts are decided first."""
    model = Model([0])
    results = bisected(model, 8, calls)
    assert len(model.calls) == min(calls, 6)
    assert sum(isinstance(result, str) for result in results) == answered


@pytest.mark.parametrize("guilty", [0, 7])
def test_stop_after_a_fatal_failure(guilty: int) -> None:
    """No call is made after a fatal failure, and all undecided items get that failure."""
    model = Model([2, guilty])
    last = Failed(())

    def attempt(items: Sequence[int]) -> list[str] | Failed:
        result = model(items)
        return last if len(items) == 1 and items[0] == guilty else result

    results = bisect(
        range(8),
        attempt,
        Failed(tuple(range(8))),
        hopeless=lambda: model.calls[-1] == (guilty,),
    )

    assert model.calls[-1] == (guilty,)
    assert all(isinstance(result, str) or result in (last, Failed((2,))) for result in results)
    assert results[guilty] is last
