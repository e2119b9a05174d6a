"""Results of bench and tune as tables, JSON, notes and a plot."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from torch_py_backend.config import tuned_settings
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import BenchError
from torch_py_backend.tools import tuning
from torch_py_backend.tools.load_generator import STAGES, Open, Point, ServerWork
from torch_py_backend.tools.tuning import Row

PLOT = "tuned.png"
_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
# Above this share of a core, the client is likely to limit the figures.
_BUSY = 0.85
# An open load is an overload if its answers take this many times its duration.
_LATE = 1.2
_MILLI = 1e3
# The most rows on the Pareto front whose names are drawn; more would overlap.
_LABELLED = 6


# --- tables and files ------------------------------------------------------------------------


def three_digits(value: float) -> str:
    """Return a figure with about three digits and without an exponent; a dash for nan."""
    if math.isnan(value):
        return "-"
    limits = ((3, 0.1), (2, 10), (1, 100))
    digits = next((digits for digits, limit in limits if 0 < value < limit), 0 if value else 2)
    return f"{value:,.{digits}f}"


def table(
    headings: Sequence[str],
    *,
    text_columns: int = 1,
    title: str | None = None,
    caption: str | None = None,
) -> Table:
    """Return an empty table for a terminal; figures, after the columns of text, are not cut off."""
    result = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for number, heading in enumerate(headings):
        if number < text_columns:
            result.add_column(heading, min_width=12, max_width=60, no_wrap=True)
        else:
            # Wider columns begin a group; those of `bench` fit into 80 characters.
            width = {"p50": 6, "queue": 6, "rows/call": 11}.get(heading)
            result.add_column(heading, justify="right", no_wrap=True, min_width=width)
    return result


def check_writable(path: Path) -> None:
    """Raise before a measurement, rather than after it, if a file cannot be written.

    Raises:
        BenchError: the file cannot be written.
    """
    if path.is_dir():
        raise BenchError(f"cannot write {path}: it is a folder.")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}.") from error


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write the whole file, or nothing.

    Raises:
        BenchError: the file cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise BenchError(f"cannot write {path}: {error.strerror}.") from error


# --- bench -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """The measurements of one run of `bench`, and their conditions.

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

    def as_json(self) -> JsonObject:
        """Return all figures; an unknown figure is null."""
        points = []
        for point in self.points:
            result, server = point.result, point.server or ServerWork()
            latencies = zip(_PERCENTILES, result.percentiles(*_PERCENTILES.values()), strict=True)
            stages = server.stages.items()
            points.append(
                {
                    self.kind: _amount(point),
                    "seconds": result.seconds,
                    "answered": len(result.latencies),
                    "failed": result.errors,
                    "first_error": result.first_error or None,
                    "unanswered": len(result.unanswered),
                    "requests_per_second": result.throughput,
                    "rows_per_second": result.throughput * self.rows,
                    "latency_ms": {
                        name: None if math.isnan(value) else value * _MILLI
                        for name, value in latencies
                    },
                    "triton": {
                        "requests": server.requests,
                        "failures": server.failures,
                        "per_request_ms": {stage: value * _MILLI for stage, value in stages},
                        "calls": server.calls,
                        "rows_per_call": server.rows / server.calls if server.calls else None,
                        "batches": {str(size): count for size, count in server.batches.items()},
                    },
                    "client_busy": result.busy,
                }
            )
        return {
            "model": self.model,
            "server": self.server,
            "inputs": self.inputs,
            "rows_per_request": self.rows,
            "seconds": self.seconds,
            "warmup_seconds": self.warmup,
            "interrupted": self.interrupted,
            "points": points,
        }

    def table(self) -> Table:
        """Return one row for each point; times are in milliseconds."""
        stages = [stage.removeprefix("compute_") for stage in STAGES]
        result = table(
            (self.kind, "req/s", *_PERCENTILES, *stages, "rows/call"),
            text_columns=0,
            title=f"{self.model} on {self.server},"
            f" {'1 row' if self.rows == 1 else f'{self.rows:g} rows'} in a request",
            caption="p50 to max: latency; queue to output: means of Triton's own; all in ms",
        )
        for point in self.points:
            throughput, server = point.result.throughput, point.server or ServerWork()
            times = [
                *point.result.percentiles(*_PERCENTILES.values()),
                *(server.stages.get(stage, math.nan) for stage in STAGES),
            ]
            calls = "-"
            if server.batches:
                smallest, largest = min(server.batches), max(server.batches)
                calls = f"{server.rows / server.calls:.1f} ({smallest}-{largest})"
            result.add_row(
                f"{_amount(point):g}",
                f"{throughput:,.{1 if throughput < 100 else 0}f}",  # noqa: PLR2004
                *(three_digits(value * _MILLI) for value in times),
                calls,
            )
        return result

    def notes(self) -> list[str]:
        """Return a sentence for each reason to doubt the figures."""
        sentences = []
        for point in self.points:
            load, result = point.load, point.result
            unanswered = result.unanswered.size
            total = len(result.latencies) + result.errors + unanswered
            if result.errors:
                sentences.append(
                    f"{load}: {result.errors} of {total} requests failed; the first:"
                    f" {result.first_error}"
                )
            if unanswered:
                sentences.append(
                    f"{load}: {unanswered} of {total} requests had no answer when the measurement"
                    " ended; they count with their age."
                )
            if isinstance(load, Open) and result.seconds > self.seconds * _LATE:
                sentences.append(
                    f"{load}: the server did not keep up; what was due in {self.seconds:g} s took"
                    f" {result.seconds:.1f} s."
                )
            if result.busy > _BUSY:
                sentences.append(
                    f"{load}: the client used {result.busy:.0%} of a core; it may be what limits"
                    " the figures."
                )
        if self.interrupted:
            sentences.append("Interrupted: points are missing or cut short.")
        return sentences


def _amount(point: Point) -> float:
    return point.load.rate if isinstance(point.load, Open) else point.load.concurrency


# --- tune ------------------------------------------------------------------------------------


def tuning_line(row: Row) -> str:
    """Return a candidate's two figures, and how many times better than untuned they are."""
    if row.failure:
        return f"{row.candidate}: {row.failure}"
    latency, throughput = three_digits(row.latency_ms), three_digits(row.throughput)
    return (
        f"{row.candidate}: {latency} ms ({row.latency_gain:.2f}),"
        f" {throughput} rows/s ({row.throughput_gain:.2f})"
    )


def tuning_table(rows: Sequence[Row], max_error: float, choice: Row | None) -> Table:
    """Return the rows in the order in which they were tried; the choice is marked.

    Latency is of one row with one request in flight, throughput of full batches. Beside each is the
    gain over the first row, the untuned configuration. ± is the larger standard error of the two.
    """
    on_gpu = any(row.device_memory_mb for row in rows)
    figures = ("ms", "gain", "rows/s", "gain", "±", "MB", *["GPU MB"] * on_gpu, "error", "load s")
    result = table(("candidate", "threads\nx inst.", *figures, ""))
    for number, row in enumerate(rows):
        remark = "untuned" if number == 0 else ""
        if not tuning.fits(row, max_error):
            remark = "failed" if row.failure else "inexact"
        remark = "chosen" if row == choice else remark
        cells = [""] * len(figures)
        if row.rounds:
            cells = [
                three_digits(row.latency_ms),
                f"{row.latency_gain:.2f}",
                three_digits(row.throughput),
                f"{row.throughput_gain:.2f}",
                f"{max(row.latency_spread, row.throughput_spread):.0%}" if number else "",
                f"{row.memory_mb:,.0f}",
                *[f"{row.device_memory_mb:,.0f}"] * on_gpu,
                f"{row.error:.0e}" if row.error else "0",
                f"{row.load_s:.1f}",
            ]
        result.add_row(
            escape(row.candidate.title),
            f"{row.candidate.threads} x {row.candidate.instances}",
            *cells,
            f" {remark}",
            style={"chosen": "bold green", "inexact": "dim", "failed": "dim"}.get(remark, ""),
        )
    return result


def tuning_entry(
    machine: Mapping[str, object],
    rows: Sequence[Row],
    choice: Row | None,
    conditions: Mapping[str, object],
) -> dict[str, object]:
    """Return the entry of tuned.json of one machine.

    Args:
        machine: the result of `tuned_settings.machine_facts`.
        rows: the measurements.
        choice: the chosen row.
        conditions: the options of the run.
    """
    chosen = choice and {
        "parameters": dict(choice.candidate.parameters),
        "instances": choice.candidate.instances,
        "latency_ms": choice.latency_ms,
        "latency_gain": choice.latency_gain,
        "throughput": choice.throughput,
        "throughput_gain": choice.throughput_gain,
    }
    return {
        "machine": dict(machine),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "conditions": dict(conditions),
        "chosen": chosen,
        "rows": [asdict(row) for row in rows],
    }


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(path: Path, title: str, rows: Sequence[Row], max_error: float, choice: Row | None) -> None:
    """Draw latency against throughput as a PNG: each row, the Pareto front, the choice.

    Raises:
        TuneError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  slow, and not everywhere
    from matplotlib.ticker import LogFormatter  # noqa: PLC0415

    figure = Figure(figsize=(9, 6), layout="constrained")
    # Logarithmic, because candidates differ by factors.
    axes = figure.add_subplot(
        title=title,
        xlabel="latency of one row, ms (median)",
        ylabel="rows per second with full batches",
        xscale="log",
        yscale="log",
    )
    fitting = [row for row in rows if tuning.fits(row, max_error)]
    others = [row for row in rows if row.rounds and row not in fitting]
    front, chosen = tuning.front(fitting), [choice] if choice else []
    for label, group, form, colour, size in (
        ("outside the tolerance", others, "x", "tab:red", 6),
        ("measured", fitting, "o", "tab:gray", 6),
        ("Pareto front", front, "o-", "tab:blue", 6),
        ("chosen", chosen, "*", "tab:green", 18),
    ):
        if group:
            latencies = [row.latency_ms for row in group]
            throughputs = [row.throughput for row in group]
            axes.plot(latencies, throughputs, form, label=label, color=colour, markersize=size)
    labelled = front[: _LABELLED - 1] + [row for row in chosen if row not in front]
    for number, row in enumerate(labelled):
        axes.annotate(
            str(row.candidate),
            (row.latency_ms, row.throughput),
            xytext=(10, -14 if number % 2 else 8),
            textcoords="offset points",
            fontsize="small",
        )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.4)))  # no powers of ten
    axes.margins(x=0.3, y=0.15)
    axes.grid(which="both", alpha=0.2)
    if fitting or others:  # matplotlib warns about an empty legend
        figure.legend(loc="outside lower center", ncols=4)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    tuned_settings.write_atomically(path, png.getvalue())
