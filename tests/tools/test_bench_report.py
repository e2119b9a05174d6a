"""A sweep told as a table, as JSON and as a plot."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from torch_py_backend.errors import BenchError
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
    points = tuple(Point(shape, one, server) for shape, one in zip(loads, results, strict=False))
    return Report("m", "grpc://h:1", "made up", rows, 2, 1, interrupted, points)


def _printed(told: Report) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(bench_report.table(told))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_table() -> None:
    """One line for each point, with the requests, the latencies, Triton's split and batches."""
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


def test_what_is_not_known_is_a_dash() -> None:
    """No answers and no statistics leave gaps, not zeros, and JSON has null for them."""
    told = _report(_result(0, errors=1), server=_NOTHING)
    assert _printed(told).splitlines()[3].split() == ["1", "0.0", *["-"] * 9]
    (entry,) = bench_report.document(told)["points"]
    assert entry["latency_ms"] == {"p50": None, "p90": None, "p99": None, "max": None}
    assert entry["triton"]["rows_per_call"] is None


def test_document() -> None:
    """Everything is in the JSON, strictly valid, with units in the names."""
    told = bench_report.document(_report(_result(errors=1, unanswered=0), rows=2, interrupted=True))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["interrupted"] is True
    (entry,) = told["points"]
    assert entry["concurrency"] == 1
    assert entry["requests_per_second"] == 10
    assert entry["rows_per_second"] == 20
    assert (entry["answered"], entry["failed"], entry["first_error"]) == (20, 1, "it <broke>.")
    assert entry["latency_ms"]["max"] == pytest.approx(100)
    assert entry["triton"]["per_request_ms"] == dict.fromkeys(STAGES, 2.0)
    assert entry["triton"]["batches"] == {"1": 4, "4": 4}


def test_an_open_load_has_a_rate() -> None:
    """The first column and JSON's key say what was varied."""
    told = Report("m", "s", "i", 1, 2, 1, False, (Point(Open(0.5), _result(), _SERVER),))
    assert _printed(told).splitlines()[1].split()[0] == "rate"
    assert bench_report.document(told)["points"][0]["rate"] == 0.5


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
    """What makes figures doubtful is said in a sentence."""
    (note,) = bench_report.notes(_report(result))
    assert re.search(says, note)


def test_an_overload_is_noted() -> None:
    """An open load whose answers came much later than they were due."""
    told = Report("m", "s", "i", 1, 2, 1, True, (Point(Open(9), _result(took=5), _SERVER),))
    late, interrupted = bench_report.notes(told)
    assert late == "rate 9: the server did not keep up; what was due in 2 s took 5.0 s."
    assert interrupted.startswith("Interrupted")


def test_nothing_to_note() -> None:
    """A sound measurement has no notes."""
    assert bench_report.notes(_report(_result(), _result())) == []


@pytest.mark.parametrize(
    "told",
    [
        _report(_result()),
        _report(_result(), _result(errors=2)),
        _report(_result(0, errors=1), server=_NOTHING),
    ],
    ids=["one", "two", "nothing"],
)
def test_plots(told: Report) -> None:
    """Both kinds are drawn, also of a single point and of one without figures."""
    assert bench_report.writer(Path("a.png"))(told).startswith(b"\x89PNG")
    page = bench_report.writer(Path("a.html"))(told).decode()
    assert page.startswith("<!doctype html>")
    assert "data:image/svg+xml;base64," in page
    assert "<th>rows/call</th>" in page
    assert "it <broke>" not in page


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.PNG.txt"])
def test_other_kinds_of_plots_are_refused(name: str) -> None:
    """The sentence names the two that there are."""
    with pytest.raises(BenchError, match=r"expected a name that ends in \.png or \.html"):
        bench_report.writer(Path(name))


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """What draws is in an extra; it is asked for before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match=r"pip install 'torch-py-backend\[bench\]'"):
        bench_report.writer(Path("a.png"))
