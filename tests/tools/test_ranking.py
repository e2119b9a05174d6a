"""Rows from rounds, the choice, and the Pareto front."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_py_backend.tools import ranking
from torch_py_backend.tools.candidates import Candidate
from torch_py_backend.tools.ranking import Measured, Prefer, Row


def _measured(latency: float = 1.0, **changes: Any) -> Measured:
    plain: dict[str, Any] = {
        "p99_ms": 2.0,
        "throughput": {1: 10.0, 8: 40.0},
        "memory_mb": 100.0,
        "device_memory_mb": 0.0,
        "error": 0.0,
        "load_s": 1.0,
    }
    return Measured(latency, **(plain | changes))


def _row(name: str, latency: float, throughput: float, **changes: Any) -> Row:
    parameters = {"OPTIMIZE": changes.pop("optimize")} if "optimize" in changes else {}
    return Row(
        Candidate(name, parameters),
        **({"rounds": 3, "latency_ms": latency, "throughput": throughput} | changes),
    )


def test_row() -> None:
    """A row has the medians, the spread, the largest error and the first load time."""
    row = ranking.row(
        Candidate("eager", {}),
        [
            _measured(1.0, error=1e-6, load_s=9.0),
            _measured(3.0, throughput={1: 10.0, 8: 60.0}),
            _measured(2.0, throughput={1: 90.0, 8: 50.0}),
        ],
    )
    assert (row.latency_ms, row.latency_spread) == (2.0, 0.5)
    assert (row.batch, row.throughput, row.throughput_spread) == (8, 50.0, 0.2)
    assert (row.error, row.load_s, row.rounds) == (1e-6, 9.0, 3)


def test_row_is_json() -> None:
    """A row can be written as JSON."""
    row = ranking.row(Candidate("eager", {"NUM_THREADS": "1"}), [_measured()])
    document = json.loads(json.dumps(row.as_json()))
    assert document["by_batch"] == {"1": 10.0, "8": 40.0}
    assert document["candidate"]["parameters"] == {"NUM_THREADS": "1"}
    assert ranking.row(Candidate("a", {}), []).as_json()["by_batch"] == {}


def test_failed_once() -> None:
    """A candidate that failed in one round is not chosen."""
    row = ranking.row(Candidate("eager", {}), [_measured()], "it crashed")
    assert (row.rounds, row.failure) == (0, "it crashed")
    assert not ranking.fits(row, 1.0)


_SLOW_AND_QUICK = [_row("throughput", 5.0, 100.0), _row("latency", 1.0, 50.0)]


@pytest.mark.parametrize(
    ("rows", "prefer", "choice"),
    [
        pytest.param([], Prefer.THROUGHPUT, None, id="nothing"),
        pytest.param([_row("a", 1, 1, error=0.2)], Prefer.THROUGHPUT, None, id="inexact"),
        pytest.param(
            [_row("a", 1, 99, error=0.2), _row("b", 1, 1)], Prefer.THROUGHPUT, "b", id="exact"
        ),
        pytest.param(
            [_row("a", 1, 99, failure="x"), _row("b", 1, 1)], Prefer.THROUGHPUT, "b", id="failed"
        ),
        pytest.param(_SLOW_AND_QUICK, Prefer.THROUGHPUT, "throughput", id="by-throughput"),
        pytest.param(_SLOW_AND_QUICK, Prefer.LATENCY, "latency", id="by-latency"),
        pytest.param(
            [_row("better", 1, 102, optimize="freeze"), _row("simpler", 1, 100)],
            Prefer.THROUGHPUT,
            "simpler",
            id="within-the-noise",
        ),
        pytest.param(
            [_row("better", 1, 120, optimize="freeze"), _row("simpler", 1, 100)],
            Prefer.THROUGHPUT,
            "better",
            id="beyond-the-noise",
        ),
        pytest.param(
            [
                _row("better", 1, 108, optimize="freeze", throughput_spread=0.2),
                _row("simpler", 1, 100),
            ],
            Prefer.THROUGHPUT,
            "simpler",
            id="within-its-spread",
        ),
        pytest.param(
            [
                _row("better", 1, 120, optimize="freeze"),
                _row("simpler", 1, 100, throughput_spread=0.9),
            ],
            Prefer.THROUGHPUT,
            "better",
            id="a-disturbed-round",
        ),
        pytest.param(
            [_row("b", 1, 100), _row("a", 1, 101)], Prefer.THROUGHPUT, "a", id="equally-simple"
        ),
    ],
)
def test_choice(rows: list[Row], prefer: Prefer, choice: str | None) -> None:
    """The best row within the tolerance is chosen; of those that differ by noise, the simplest."""
    chosen = ranking.choose(rows, 0.1, prefer)
    assert (chosen.candidate.title if chosen else None) == choice


def test_front() -> None:
    """A row is on the front unless another is better in one figure and no worse in the other."""
    rows = [
        _row("slow", 9.0, 90.0),
        _row("beaten", 9.0, 80.0),
        _row("quick", 1.0, 10.0),
        _row("middle", 5.0, 50.0),
        _row("beaten too", 6.0, 50.0),
    ]
    assert [row.candidate.title for row in ranking.front(rows)] == ["quick", "middle", "slow"]
