"""A benchmark's figures as a table, as JSON and as notes."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from torch_py_backend.tools import bench_report
from torch_py_backend.tools.bench_report import Report
from torch_py_backend.tools.load_generator import Closed, Load, Open, Result
from torch_py_backend.tools.server_statistics import STAGES, Measurement
from torch_py_backend.tools.sweep import Point

_SERVER = Measurement(20, 0, dict.fromkeys(STAGES, 0.002), {1: 4, 4: 4})
_NOTHING = Measurement(0, 0, {}, {})


def _result(
    answered: int = 20, *, errors: int = 0, unanswered: int = 0, busy: float = 0.5, took: float = 2
) -> Result:
    latencies = np.linspace(0.001, 0.1, answered)
    first = "it <broke>." if errors else ""
    return Result(took, latencies, np.full(unanswered, 3.0), errors, first, busy)


def _report(
    *results: Result, server: Measurement = _SERVER, rows: float = 1, interrupted: bool = False
) -> Report:
    loads: list[Load] = [Closed(1), Closed(8), Closed(32)]
    points = [Point(load, result, server) for load, result in zip(loads, results, strict=False)]
    return _of(points, rows, interrupted=interrupted)


def _of(points: list[Point], rows: float = 1, *, interrupted: bool = False) -> Report:
    return Report("m", 2, 1, "grpc://h:1", "made up", rows, points, interrupted)


def _printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(bench_report.table(report))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_table() -> None:
    """The table has one line for each point: requests, latencies, Triton's split and batches."""
    text = _printed(_report(_result(), _result(1234, took=1)))
    assert "m on grpc://h:1, 1 row in a request" in text
    lines = [line.split() for line in text.splitlines()]
    assert lines[1] == [
        "concurrency", "req/s", "p50", "p90", "p99", "max", "queue", "input", "infer", "output",
        "rows/call",
    ]  # fmt: skip
    assert lines[3] == [
        "1", "10.0", "50.5", "90.1", "99.0", "100",
        "2.00", "2.00", "2.00", "2.00", "2.5", "(1-4)",
    ]  # fmt: skip
    assert lines[4][:2] == ["8", "1,234"]


def test_table_fits_a_narrow_terminal() -> None:
    """Large figures are not cut off at 80 columns."""
    server = Measurement(9, 0, dict.fromkeys(STAGES, 0.1234), {1: 1, 64: 400})
    slow = Result(1.0, np.full(99_999, 1.2345), np.array([]), 0, "", 0.1)
    text = _printed(_report(slow, server=server))
    assert "…" not in text
    assert "99,999" in text


def test_unknown_figures_are_dashes() -> None:
    """Without answers and statistics, the table has dashes and the JSON has null."""
    report = _report(_result(0, errors=1), server=_NOTHING)
    assert _printed(report).splitlines()[3].split() == ["1", "0.0", *["-"] * 9]
    (entry,) = bench_report.document(report)["points"]
    assert entry["latency_ms"] == {"p50": None, "p90": None, "p99": None, "max": None}
    assert entry["triton"]["rows_per_call"] is None


def test_document() -> None:
    """The JSON is strictly valid and has all figures, with units in the names."""
    report = bench_report.document(
        _report(_result(errors=1, unanswered=0), rows=2, interrupted=True)
    )
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["interrupted"] is True
    (entry,) = report["points"]
    assert entry["concurrency"] == 1
    assert entry["requests_per_second"] == 10
    assert entry["rows_per_second"] == 20
    assert (entry["answered"], entry["failed"], entry["first_error"]) == (20, 1, "it <broke>.")
    assert entry["latency_ms"]["max"] == pytest.approx(100)
    assert entry["triton"]["per_request_ms"] == dict.fromkeys(STAGES, 2.0)
    assert entry["triton"]["batches"] == {"1": 4, "4": 4}


def test_an_open_load_has_a_rate() -> None:
    """The first column and the JSON key name the quantity that was varied."""
    report = _of([Point(Open(0.5), _result(), _SERVER)])
    assert _printed(report).splitlines()[1].split()[0] == "rate"
    assert bench_report.document(report)["points"][0]["rate"] == 0.5


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (_result(errors=2), r"^concurrency 1: 2 of 22 requests failed; the first: it <broke>.$"),
        (_result(unanswered=3), "3 of 23 requests had no answer"),
        (_result(busy=0.97), "the client used 97% of a core"),
    ],
    ids=["errors", "unanswered", "busy"],
)
def test_notes(result: Result, says: str) -> None:
    """Each reason to doubt the figures is one sentence."""
    (note,) = bench_report.notes(_report(result))
    assert re.search(says, note)


def test_an_overload_is_noted() -> None:
    """An open load whose answers are late is reported."""
    report = _of([Point(Open(9), _result(took=5), _SERVER)], interrupted=True)
    late, interrupted = bench_report.notes(report)
    assert late == "rate 9: the server did not keep up; what was due in 2 s took 5.0 s."
    assert interrupted.startswith("Interrupted")


def test_nothing_to_note() -> None:
    """A sound measurement has no notes."""
    assert bench_report.notes(_report(_result(), _result())) == []
