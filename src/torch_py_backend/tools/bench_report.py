"""The figures of a benchmark as a table, as JSON and as notes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.table import Table

from torch_py_backend.tools.load_generator import Open
from torch_py_backend.tools.server_statistics import STAGES
from torch_py_backend.tools.sweep import Point, title

_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
# Above this share of a core, the client is likely to limit the figures.
_BUSY = 0.85
# An open load is an overload if its answers take this many times its duration.
_LATE = 1.2
_MILLI = 1e3


@dataclass(slots=True)
class Report:
    """The measurements of one run, and their conditions.

    Attributes:
        model: the model's name.
        seconds: the length of each point.
        warmup: seconds before each point that do not count.
        server: the server's address.
        inputs: where the inputs came from.
        rows: rows in one request, on average.
        points: one for each load.
        interrupted: whether points are missing or cut short.
    """

    model: str
    seconds: float
    warmup: float
    server: str = ""
    inputs: str = ""
    rows: float = 1.0
    points: list[Point] = field(default_factory=list)
    interrupted: bool = False

    @property
    def kind(self) -> str:
        """The quantity that differs between the points."""
        return "rate" if isinstance(self.points[0].load, Open) else "concurrency"


def document(report: Report) -> dict[str, Any]:
    """Return all figures as JSON; an unknown figure is null."""
    return {
        "model": report.model,
        "server": report.server,
        "inputs": report.inputs,
        "rows_per_request": report.rows,
        "seconds": report.seconds,
        "warmup_seconds": report.warmup,
        "interrupted": report.interrupted,
        "points": [_entry(report, point) for point in report.points],
    }


def _entry(report: Report, point: Point) -> dict[str, Any]:
    result, server = point.result, point.server
    latencies = zip(_PERCENTILES, result.percentiles(*_PERCENTILES.values()), strict=True)
    return {
        report.kind: _amount(point),
        "seconds": result.seconds,
        "answered": len(result.latencies),
        "failed": result.errors,
        "first_error": result.first_error or None,
        "unanswered": len(result.unanswered),
        "requests_per_second": result.throughput,
        "rows_per_second": result.throughput * report.rows,
        "latency_ms": {
            name: None if math.isnan(value) else value * _MILLI for name, value in latencies
        },
        "triton": {
            "requests": server.requests,
            "failures": server.failures,
            "per_request_ms": {stage: value * _MILLI for stage, value in server.stages.items()},
            "calls": server.calls,
            "rows_per_call": server.rows / server.calls if server.calls else None,
            "batches": {str(size): count for size, count in server.batches.items()},
        },
        "client_busy": result.busy,
    }


def _amount(point: Point) -> float:
    return point.load.rate if isinstance(point.load, Open) else point.load.concurrency


def table(report: Report) -> Table:
    """Return one row for each point; times are in milliseconds."""
    rows = "1 row" if report.rows == 1 else f"{report.rows:g} rows"
    result = Table(
        title=f"{report.model} on {report.server}, {rows} in a request",
        title_justify="left",
        caption="p50 to max: latency; queue to output: means of Triton's own; all in ms",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    # Wider columns begin a group; all together fit into 80 characters.
    stages = [stage.removeprefix("compute_") for stage in STAGES]
    for heading in (report.kind, "req/s", *_PERCENTILES, *stages, "rows/call"):
        width = {"p50": 6, "queue": 6, "rows/call": 11}.get(heading)
        result.add_column(heading, justify="right", no_wrap=True, min_width=width)
    for point in report.points:
        throughput, server = point.result.throughput, point.server
        times = [
            *point.result.percentiles(*_PERCENTILES.values()),
            *(server.stages.get(stage, math.nan) for stage in STAGES),
        ]
        batches = "-"
        if server.batches:
            smallest, largest = min(server.batches), max(server.batches)
            batches = f"{server.rows / server.calls:.1f} ({smallest}-{largest})"
        result.add_row(
            f"{_amount(point):g}",
            f"{throughput:,.{1 if throughput < 100 else 0}f}",  # noqa: PLR2004
            *(_three_digits(value * _MILLI) for value in times),
            batches,
        )
    return result


def _three_digits(value: float) -> str:
    if math.isnan(value):
        return "-"
    digits = 2 if value < 10 else 1 if value < 100 else 0  # noqa: PLR2004
    return f"{value:,.{digits}f}"


def notes(report: Report) -> list[str]:
    """Return a sentence for each reason to doubt the figures."""
    sentences = []
    for point in report.points:
        result = point.result
        total = len(result.latencies) + result.errors + result.unanswered.size
        if result.errors:
            sentences.append(
                f"{title(point.load)}: {result.errors} of {total} requests failed; the first:"
                f" {result.first_error}"
            )
        if result.unanswered.size:
            sentences.append(
                f"{title(point.load)}: {result.unanswered.size} of {total} requests had no answer"
                " when the measurement ended; they count with their age."
            )
        if isinstance(point.load, Open) and result.seconds > report.seconds * _LATE:
            sentences.append(
                f"{title(point.load)}: the server did not keep up; what was due in"
                f" {report.seconds:g} s took {result.seconds:.1f} s."
            )
        if result.busy > _BUSY:
            sentences.append(
                f"{title(point.load)}: the client used {result.busy:.0%} of a core; it may be what"
                " limits the figures."
            )
    if report.interrupted:
        sentences.append("Interrupted: points are missing or cut short.")
    return sentences
