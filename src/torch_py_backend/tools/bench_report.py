"""A sweep told: as a table, as JSON, as a picture."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.table import Table

from torch_py_backend.errors import BenchError
from torch_py_backend.tools.load_generator import Open
from torch_py_backend.tools.server_statistics import STAGES
from torch_py_backend.tools.sweep import Point, named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHARES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
_STAGE_LABELS = dict(zip(STAGES, ("queue", "input", "infer", "output"), strict=True))
# Above this share of a core, the client is likely to be what limits the figures.
_BUSY = 0.85
# An open load whose answers take this much longer than its requests were due is an overload.
_LATE = 1.2
_MILLI = 1e3
_DPI = 120
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00")  # told apart by colour-blind readers too


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured, and how.

    Attributes:
        model: the model's name.
        server: the address that was asked.
        inputs: where the inputs came from.
        rows: rows in one request, on average.
        seconds: the length of each point.
        warmup: the seconds before each point that do not count.
        interrupted: whether points are missing or cut short.
        points: one for each load.
    """

    model: str
    server: str
    inputs: str
    rows: float
    seconds: float
    warmup: float
    interrupted: bool
    points: tuple[Point, ...]

    @property
    def kind(self) -> str:
        """What the points differ in."""
        return "rate" if isinstance(self.points[0].load, Open) else "concurrency"


def _amount(point: Point) -> float:
    return point.load.rate if isinstance(point.load, Open) else point.load.concurrency


def document(report: Report) -> dict[str, Any]:
    """Everything that was measured, as JSON takes it: what is not known is null."""
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
    return {
        report.kind: _amount(point),
        "seconds": result.seconds,
        "answered": len(result.latencies),
        "failed": result.errors,
        "first_error": result.first_error or None,
        "unanswered": len(result.unanswered),
        "requests_per_second": result.throughput,
        "rows_per_second": result.throughput * report.rows,
        "latency_ms": {key: _known(value * _MILLI) for key, value in _latencies(point).items()},
        "triton": {
            "requests": server.requests,
            "failures": server.failures,
            "per_request_ms": {stage: value * _MILLI for stage, value in server.stages.items()},
            "calls": server.calls,
            "rows_per_call": _known(_rows_per_call(point)),
            "batches": {str(size): count for size, count in server.batches.items()},
        },
        "client_busy": result.busy,
    }


def _latencies(point: Point) -> dict[str, float]:
    return dict(zip(_SHARES, point.result.percentiles(*_SHARES.values()), strict=True))


def _rows_per_call(point: Point) -> float:
    return point.server.rows / point.server.calls if point.server.calls else math.nan


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def table(report: Report) -> Table:
    """One line for each point; times in milliseconds."""
    made = Table(
        title=_title(report),
        title_justify="left",
        caption="p50 to max: latency; queue to output: means of Triton's own; all in ms",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    # Wider columns begin a group; all together fit into 80 characters.
    headings = (report.kind, "req/s", *_SHARES, *_STAGE_LABELS.values(), "rows/call")
    for heading in headings:
        width = {"p50": 6, "queue": 6, "rows/call": 11}.get(heading)
        made.add_column(heading, justify="right", no_wrap=True, min_width=width)
    for point in report.points:
        stages = point.server.stages
        made.add_row(
            f"{_amount(point):g}",
            f"{point.result.throughput:,.{1 if point.result.throughput < 100 else 0}f}",  # noqa: PLR2004
            *(_short(value * _MILLI) for value in _latencies(point).values()),
            *(_short(stages.get(stage, math.nan) * _MILLI) for stage in STAGES),
            _batches(point),
        )
    return made


def _title(report: Report) -> str:
    rows = "1 row" if report.rows == 1 else f"{report.rows:g} rows"
    return f"{report.model} on {report.server}, {rows} in a request"


def _short(value: float) -> str:
    """Three digits that matter."""
    if math.isnan(value):
        return "-"
    digits = 2 if value < 10 else 1 if value < 100 else 0  # noqa: PLR2004
    return f"{value:,.{digits}f}"


def _batches(point: Point) -> str:
    if not point.server.batches:
        return "-"
    return f"{_rows_per_call(point):.1f} ({min(point.server.batches)}-{max(point.server.batches)})"


def notes(report: Report) -> list[str]:
    """What a reader of the table has to know, in sentences."""
    told = []
    for point in report.points:
        result = point.result
        total = len(result.latencies) + result.errors + result.unanswered.size
        if result.errors:
            told.append(
                f"{named(point.load)}: {result.errors} of {total} requests failed; the first:"
                f" {result.first_error}"
            )
        if result.unanswered.size:
            told.append(
                f"{named(point.load)}: {result.unanswered.size} of {total} requests had no answer"
                " when the measurement ended; they count with their age."
            )
        if isinstance(point.load, Open) and result.seconds > report.seconds * _LATE:
            told.append(
                f"{named(point.load)}: the server did not keep up; what was due in"
                f" {report.seconds:g} s took {result.seconds:.1f} s."
            )
        if result.busy > _BUSY:
            told.append(
                f"{named(point.load)}: the client used {result.busy:.0%} of a core; it may be what"
                " limits the figures."
            )
    if report.interrupted:
        told.append("Interrupted: points are missing or cut short.")
    return told


def writer(path: Path) -> Callable[[Report], bytes]:
    """What makes the picture that a file of this name holds.

    Raises:
        BenchError: it is neither a PNG nor HTML, or what draws it is not installed.
    """
    found = {".png": _png, ".html": _html}.get(path.suffix)
    if found is None:
        raise BenchError(f"--plot is '{path}'; expected a name that ends in .png or .html.")
    try:
        import matplotlib as _  # noqa: F401, ICN001, PLC0415  in an extra
    except ImportError:
        raise BenchError(
            "matplotlib, which draws plots, is not installed;"
            " pip install 'torch-py-backend[bench]' brings it."
        ) from None
    return found


def _png(report: Report) -> bytes:
    return _drawn(report, "png")


def _html(report: Report) -> bytes:
    """One file that needs no other: the picture, the table, the notes."""
    picture = base64.b64encode(_drawn(report, "svg")).decode()
    made = table(report)
    cells = zip(*(list(column.cells) for column in made.columns), strict=True)
    head = "".join(f"<th>{html.escape(str(column.header))}</th>" for column in made.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in cells
    )
    remarks = "".join(f"<p>{html.escape(note)}</p>" for note in notes(report))
    return _PAGE.format(
        title=html.escape(str(made.title)), picture=picture, head=head, body=body, remarks=remarks
    ).encode()


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em }}
img {{ width: 100% }}
td, th {{ text-align: right; padding: .2em .9em; border-bottom: 1px solid #ddd }}
</style>
<h1>{title}</h1>
<img alt="throughput, latencies and Triton's split" src="data:image/svg+xml;base64,{picture}">
<table><tr>{head}</tr>{body}</table>
{remarks}
</html>
"""


def _drawn(report: Report, kind: str) -> bytes:
    # A Figure without pyplot draws without a display, and keeps no state.
    from matplotlib.figure import Figure  # noqa: PLC0415  in an extra

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    figure.suptitle(f"{_title(report)}; {report.seconds:g} s for each load", fontsize=12)
    throughput, latency, split = figure.subplots(1, 3)
    _draw_throughput(throughput, report)
    _draw_latencies(latency, report)
    _draw_split(split, report)
    for axes in (throughput, latency, split):
        axes.set_xticks(
            range(len(report.points)), [f"{_amount(point):g}" for point in report.points]
        )
        axes.set_xlabel("requests/s sent" if report.kind == "rate" else "concurrency")
        axes.set_xlim(-0.6, len(report.points) - 0.4)
        axes.spines[["top", "right"]].set_visible(False)
    return _saved(figure, kind)


def _saved(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=_DPI)
    return buffer.getvalue()


def _draw_throughput(axes: Axes, report: Report) -> None:
    axes.set_title("requests answered a second")
    heights = [point.result.throughput for point in report.points]
    bars = axes.bar(range(len(heights)), heights, width=0.6, color=_COLOURS[0])
    axes.bar_label(bars, [f"{height:,.0f}" for height in heights], padding=2)
    axes.margins(y=0.1)


def _draw_latencies(axes: Axes, report: Report) -> None:
    from matplotlib.ticker import LogFormatter  # noqa: PLC0415  in an extra

    axes.set_title("latency in ms")
    found = [_latencies(point) for point in report.points]
    for share, colour in zip(_SHARES, _COLOURS, strict=True):
        values = [entry[share] * _MILLI for entry in found]
        axes.plot(range(len(values)), values, marker="o", label=share, color=colour)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.4)))  # no powers of ten
    axes.grid(axis="y", which="both", alpha=0.25)
    _legend(axes)


def _draw_split(axes: Axes, report: Report) -> None:
    axes.set_title("in Triton, mean ms a request; rows a call")
    floor = np.zeros(len(report.points))
    for (stage, label), colour in zip(_STAGE_LABELS.items(), _COLOURS, strict=True):
        heights = np.array([point.server.stages.get(stage, 0.0) for point in report.points])
        bars = axes.bar(
            range(len(heights)), heights * _MILLI, 0.6, floor, label=label, color=colour
        )
        floor += heights * _MILLI
    labels: Sequence[str] = [_batches(point) for point in report.points]
    axes.bar_label(bars, labels, padding=2)
    axes.margins(y=0.12)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Below the axes, where it hides nothing."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False)
