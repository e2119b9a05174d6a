"""Rows of candidates, and the choice among them."""

from __future__ import annotations

from typing import Any

import pytest

from torch_py_backend.tools import ranking
from torch_py_backend.tools.candidates import Candidate
from torch_py_backend.tools.ranking import Figures, Goal, Limits, Row


def _row(name: str, latency: float, throughput: float, **changes: Any) -> Row:
    """A row with these gains."""
    parameters = {"OPTIMIZE": changes.pop("optimize")} if "optimize" in changes else {}
    gains = {"latency_gain": latency, "throughput_gain": throughput}
    return Row(Candidate(name, parameters), **({"rounds": 3} | gains | changes))


def test_summary() -> None:
    """A row has medians of the rounds, and gains by the ratios of each round."""
    load = {
        "error": 0.0,
        "load_s": 1.0,
        "memory_mb": 3.0,
        "private_mb": 1.0,
        "device_memory_mb": 0.0,
    }
    rounds = [
        (Figures(2.0, 10.0, 9.0), Figures(1.0, 20.0, 5.0)),
        (Figures(8.0, 40.0, 9.0), Figures(4.0, 80.0, 7.0)),  # the machine is four times slower
        (Figures(2.0, 10.0, 9.0), Figures(1.0, 21.0, 6.0)),
    ]
    row = ranking.summarize(Candidate("eager", {}), 8, [load, load | {"error": 1e-6}], rounds, 0)
    assert (row.rounds, row.batch, row.latency_ms, row.throughput) == (3, 8, 1.0, 21.0)
    assert (row.latency_gain, row.latency_spread) == (2.0, 0.0)
    assert (row.throughput_gain, row.throughput_spread) == (2.0, 0.0)
    assert (row.memory_mb, row.error, row.load_s) == (6.0, 1e-6, 1.0)
    assert row.p99_ms == 6.0


_UNTUNED = _row("untuned", 1.0, 1.0)
_FAST = {
    "latency": _row("latency", 3.0, 0.9),
    "throughput": _row("throughput", 0.92, 4.0),
    "balanced": _row("balanced", 1.1, 1.6),
}


@pytest.mark.parametrize(
    ("candidates", "choices"),
    [
        ([*_FAST.values()], ("latency", "throughput", "balanced")),
        ([_FAST["throughput"]], ("untuned", "throughput", "untuned")),  # loses in latency
        ([_row("a", 0.97, 2.0, latency_spread=0.04)], ("untuned", "a", "a")),  # within the spread
        ([_row("a", 0.92, 2.0, latency_spread=0.5)], ("untuned", "a", "untuned")),  # a wide spread
        ([_row("inexact", 2.0, 2.0, error=0.2)], ("untuned",) * 3),
        ([_row("late", 2.0, 2.0, p99_ms=60.0)], ("untuned",) * 3),
        ([_row("failed", 2.0, 2.0, rounds=0)], ("untuned",) * 3),
        ([_row("b", 1.21, 1.21, optimize="freeze"), _row("simpler", 1.2, 1.2)], ("simpler",) * 3),
        ([_row("better", 1.4, 1.4, optimize="freeze"), _row("b", 1.2, 1.2)], ("better",) * 3),
        ([_row("b", 1.20, 1.2), _row("a", 1.21, 1.21)], ("a",) * 3),  # equally simple
        ([_row("equal", 1.01, 1.01)], ("untuned",) * 3),
    ],
)
def test_choice(candidates: list[Row], choices: tuple[str, str, str]) -> None:
    """The choice for latency, for throughput, and for both, which may lose in neither."""
    rows = [_UNTUNED, *candidates]
    chosen = [ranking.choose(rows, Limits(0.1, 50.0), goal) for goal in Goal]
    assert tuple(row.candidate.title for row in chosen if row) == choices


@pytest.mark.parametrize("untuned", [{"error": 0.2}, {"rounds": 0, "failure": "it crashed"}])
def test_choice_without_the_untuned(untuned: dict[str, Any]) -> None:
    """An untuned configuration that may not be chosen is no bar; without candidates nothing is."""
    first = _row("untuned", 1.0, 1.0, **untuned)
    for goal in Goal:
        chosen = ranking.choose([first, _row("a", 0.5, 0.5)], Limits(0.1), goal)
        assert chosen is not None
        assert chosen.candidate.title == "a"
        assert ranking.choose([first], Limits(0.1), goal) is None


@pytest.mark.parametrize(
    ("row", "behind"),
    [
        (_row("a", 1.9, 1.9), set()),
        (_row("a", 0.8, 3.0), {Goal.LATENCY, Goal.BOTH}),
        (_row("a", 3.0, 1.0), {Goal.THROUGHPUT}),
    ],
)
def test_behind(row: Row, behind: set[Goal]) -> None:
    """A row is dropped if it is far behind the best, or loses clearly where it may not."""
    best = _row("best", 1.55, 1.55)
    assert {goal for goal in Goal if ranking.is_behind(row, best, goal)} == behind
