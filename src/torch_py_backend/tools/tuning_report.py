"""The rows of a tuning run as a table, a plot and an entry of tuned.json."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from torch_py_backend.config import tuned_settings
from torch_py_backend.tools import ranking
from torch_py_backend.tools.ranking import Row

PLOT = "tuned.png"
# The most rows on the Pareto front whose names are drawn; more would overlap.
_LABELLED = 6


def table(rows: Sequence[Row], max_error: float, choice: Row | None) -> Table:
    """Return the rows in the order in which they were tried; the choice is marked.

    Latency is of one row, throughput of the best batch size. ± is half the distance of the extremes
    of all rounds, divided by their median, of latency or throughput, whichever is larger.
    """
    on_gpu = any(row.device_memory_mb for row in rows)
    result = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    result.add_column("candidate", min_width=12)
    figures = ("ms", "rows/s", "batch", "±", "MB", *(["GPU MB"] if on_gpu else []))
    headings = ("threads\nx inst.", *figures, "error", "load s")
    for heading in headings:
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("", no_wrap=True)
    for row in rows:
        remark = _remark(row, max_error, choice)
        style = {"chosen": "bold green", "": ""}.get(remark, "dim")
        cells = _figures(row, on_gpu=on_gpu) if row.rounds else [""] * (len(headings) - 1)
        threads = f"{row.candidate.threads} x {row.candidate.instances}"
        result.add_row(escape(row.candidate.title), threads, *cells, remark, style=style)
    return result


def _figures(row: Row, *, on_gpu: bool) -> list[str]:
    return [
        _three_digits(row.latency_ms),
        _three_digits(row.throughput),
        str(row.batch),
        f"{max(row.latency_spread, row.throughput_spread):.0%}" if row.rounds > 1 else "",
        f"{row.memory_mb:,.0f}",
        *([f"{row.device_memory_mb:,.0f}"] if on_gpu else []),
        f"{row.error:.0e}" if row.error else "0",
        f"{row.load_s:.1f}",
    ]


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004  no exponent


def _remark(row: Row, max_error: float, choice: Row | None) -> str:
    if row == choice:
        return "chosen"
    if row.failure:
        return "failed"
    return "" if ranking.fits(row, max_error) else "inexact"


def failures(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each row that failed."""
    return [f"{row.candidate}: {row.failure}" for row in rows if row.failure]


def entry(
    machine: Mapping[str, Any],
    rows: Sequence[Row],
    choice: Row | None,
    conditions: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the entry of tuned.json of one machine.

    Args:
        machine: the result of `tuned_settings.machine_facts`.
        rows: the measurements.
        choice: the chosen row.
        conditions: the options of the run.
    """
    chosen = None
    if choice is not None:
        candidate = choice.candidate
        chosen = {"parameters": dict(candidate.parameters), "instances": candidate.instances}
    return {
        "machine": dict(machine),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "conditions": dict(conditions),
        "chosen": chosen,
        "rows": [row.as_json() for row in rows],
    }


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(path: Path, title: str, rows: Sequence[Row], max_error: float, choice: Row | None) -> None:
    """Draw latency against throughput as a PNG: each row, the Pareto front, the choice.

    Raises:
        TuneError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  slow, and not everywhere
    from matplotlib.ticker import LogFormatter  # noqa: PLC0415

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    fitting = [row for row in rows if ranking.fits(row, max_error)]
    front = ranking.front(fitting)
    groups = (
        ("outside the tolerance", [row for row in rows if row.rounds and row not in fitting], "x"),
        ("measured", fitting, "o"),
    )
    for (label, group, marker), colour in zip(groups, ("tab:red", "tab:gray"), strict=True):
        if group:
            axes.scatter(*_points(group), marker=marker, color=colour, label=label, zorder=2)
    if front:
        axes.plot(*_points(front), "o-", color="tab:blue", label="Pareto front", zorder=3)
    if choice is not None:
        axes.scatter(
            *_points([choice]), marker="*", s=320, color="tab:green", label="chosen", zorder=4
        )
    labelled = [*front[: _LABELLED - 1], *([choice] if choice and choice not in front else [])]
    for number, row in enumerate(labelled):
        axes.annotate(
            str(row.candidate),
            (row.latency_ms, row.throughput),
            xytext=(10, -14 if number % 2 else 8),
            textcoords="offset points",
            fontsize="small",
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
            zorder=5,
        )
    axes.set_title(title)
    axes.set_xlabel("latency of one row, ms (median)")
    axes.set_ylabel("rows per second at the best batch")
    # Logarithmic, because candidates differ by factors.
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.4)))  # no powers of ten
    axes.margins(x=0.3, y=0.15)
    axes.grid(which="both", alpha=0.2)
    if axes.collections:  # matplotlib warns about an empty legend
        figure.legend(loc="outside lower center", ncols=4)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    tuned_settings.write_atomically(path, png.getvalue())


def _points(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row.latency_ms for row in rows], [row.throughput for row in rows]
