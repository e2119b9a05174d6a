"""What tuning found, for people and programs: a table, a plot, an entry of tuned.json."""

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
# Names of the rows on the Pareto front are written beside their points; more would overlap.
_LABELLED = 6


def table(rows: Sequence[Row], max_error: float, choice: Row | None) -> Table:
    """The rows, in the order in which they were tried; the choice is marked.

    Latency is of one row, throughput of the batch that has the most. ± is half the distance of
    the extremes of all rounds over their median, of latency or throughput, whichever is larger.
    """
    on_gpu = any(row.device_memory_mb for row in rows)
    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    made.add_column("candidate", min_width=12)
    figures = ("ms", "rows/s", "batch", "±", "MB", *(["GPU MB"] if on_gpu else []))
    headings = ("threads\nx inst.", *figures, "error", "load s")
    for heading in headings:
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("", no_wrap=True)
    for row in rows:
        remark = _remark(row, max_error, choice)
        style = {"chosen": "bold green", "": ""}.get(remark, "dim")
        cells = _figures(row, on_gpu=on_gpu) if row.rounds else [""] * (len(headings) - 1)
        one = row.candidate
        threads = f"{one.threads} x {one.instances}"
        made.add_row(escape(one.title), threads, *cells, remark, style=style)
    return made


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
    """A sentence for each row that failed."""
    return [f"{row.candidate}: {row.failure}" for row in rows if row.failure]


def entry(
    machine: Mapping[str, Any],
    rows: Sequence[Row],
    choice: Row | None,
    conditions: Mapping[str, Any],
) -> dict[str, Any]:
    """What tuned.json holds of one machine.

    Args:
        machine: what `tuned.machine` tells.
        rows: what was measured.
        choice: the row that was chosen.
        conditions: how it was measured, and what was asked for.
    """
    return {
        "machine": dict(machine),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "conditions": dict(conditions),
        "chosen": None
        if choice is None
        else {
            "parameters": dict(choice.candidate.parameters),
            "instances": choice.candidate.instances,
        },
        "rows": [row.as_json() for row in rows],
    }


def can_plot() -> bool:
    """Whether matplotlib is there, which only the plot needs."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(path: Path, title: str, rows: Sequence[Row], max_error: float, choice: Row | None) -> None:
    """Latency against throughput, as a PNG: each row, the Pareto front, the choice.

    Raises:
        TuneError: it cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  slow, and not everywhere
    from matplotlib.ticker import LogFormatter  # noqa: PLC0415

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    fitting = [row for row in rows if ranking.fits(row, max_error)]
    front = ranking.front(fitting)
    groups = (
        ("beyond the tolerance", [row for row in rows if row.rounds and row not in fitting], "x"),
        ("measured", fitting, "o"),
    )
    for (label, group, marker), colour in zip(groups, ("tab:red", "tab:gray"), strict=True):
        if group:
            axes.scatter(*_points(group), marker=marker, color=colour, label=label, zorder=2)
    if front:
        axes.plot(*_points(front), "o-", color="tab:blue", label="not beaten in both", zorder=3)
    if choice is not None:
        axes.scatter(
            *_points([choice]), marker="*", s=320, color="tab:green", label="chosen", zorder=4
        )
    named = [*front[: _LABELLED - 1], *([choice] if choice and choice not in front else [])]
    for number, row in enumerate(named):
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
    # Candidates differ by factors, and the slowest must not squeeze the others together.
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.4)))  # no powers of ten
    axes.margins(x=0.3, y=0.15)
    axes.grid(which="both", alpha=0.2)
    if axes.collections:  # else there is nothing to explain, which matplotlib warns about
        figure.legend(loc="outside lower center", ncols=4)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    tuned_settings.replace(path, drawn.getvalue())


def _points(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row.latency_ms for row in rows], [row.throughput for row in rows]
