"""Results of tune as tables, JSON and notes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from torch_py_backend import files
from torch_py_backend.config import tuned_settings
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import ToolError
from torch_py_backend.tools.ranking import Figures, Limits, Row
from torch_py_backend.tools.tuning import SECONDS, Tuning

# --- tables and files ------------------------------------------------------------------------


def three_digits(value: float | None) -> str:
    """Return a figure with about three digits and without an exponent; a dash for None."""
    if value is None:
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
            result.add_column(heading, justify="right", no_wrap=True)
    return result


def check_writable(path: Path) -> None:
    """Raise before a measurement, rather than after it, if a file cannot be written.

    Raises:
        ToolError: the file cannot be written.
    """
    if path.is_dir():
        raise ToolError(f"cannot write {path}: it is a folder.")
    try:
        files.check_writable(path.parent)
    except OSError as error:
        raise ToolError(f"cannot write {path}: {error.strerror}.") from error


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write the whole file, or nothing, as `write`."""
    write(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def write(path: Path, text: str) -> None:
    """Write the whole file, or nothing. A link is kept, and its target replaced.

    Raises:
        ToolError: the file cannot be written.
    """
    try:
        files.replace(path.resolve(), text.encode())
    except OSError as error:
        raise ToolError(f"cannot write {path}: {error.strerror or error}.") from error


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


def tuning_table(rows: Sequence[Row], limits: Limits, choice: Row | None) -> Table:
    """Return the rows in the order in which they were tried; the choice is marked.

    Latency is of one row with one request in flight, throughput of full batches. Beside each is the
    gain over the first row, the untuned configuration. ± is the larger standard error of the two.
    With a limit for it, p99 is that of full batches.
    """
    on_gpu = any(row.device_memory_mb for row in rows)
    timed = not math.isinf(limits.p99_ms)
    figures = ["ms", "gain", "rows/s", "gain", "±", *["p99 ms"] * timed]
    figures += ["MB", *["GPU MB"] * on_gpu, "error", "load s"]
    result = table(("candidate", "threads\nx inst.", *figures, ""))
    for row in rows:
        untuned = row is rows[0]
        if row == choice:
            remark, style = "chosen", "bold green"
        elif not limits.keeps(row):
            late = "inexact" if row.error > limits.error else "late"
            remark, style = "failed" if row.failure else late, "dim"
        else:
            remark, style = "untuned" if untuned else "", ""
        cells = [
            three_digits(row.latency_ms),
            f"{row.latency_gain:.2f}",
            three_digits(row.throughput),
            f"{row.throughput_gain:.2f}",
            "" if untuned else f"{max(row.latency_spread, row.throughput_spread):.0%}",
            *[three_digits(row.p99_ms)] * timed,
            f"{row.memory_mb:,.0f}",
            *[f"{row.device_memory_mb:,.0f}"] * on_gpu,
            f"{row.error:.0e}" if row.error else "0",
            f"{row.load_s:.1f}",
        ]
        result.add_row(
            escape(row.candidate.title),
            f"{row.candidate.threads} x {row.candidate.instances}",
            *(cells if row.rounds else [""] * len(figures)),
            f" {remark}",
            style=style,
        )
    return result


def instances_note(rows: Sequence[Row]) -> str:
    """Return what to know about the instances of one GPU; empty if no several were measured."""
    if not any(row.device_memory_mb and row.candidate.instances > 1 for row in rows):
        return ""
    return (
        "instances on one GPU: their kernels take turns unless NVIDIA's MPS runs, and each has its"
        ' own weights unless config.pbtxt sets ENABLE_WEIGHT_SHARING "true"; tune again with either'
    )


def sizes_table(sizes: Mapping[int, Figures]) -> Table:
    """Return the choice's figures for batches of several sizes, with all instances in use."""
    result = table(("rows", "p99 ms", "rows/s"))
    for rows, figures in sizes.items():
        result.add_row(str(rows), three_digits(figures.p99_ms), three_digits(figures.throughput))
    return result


def best_size(tuning: Tuning) -> str:
    """Return which max_batch_size gives the most rows per second within the limit of p99."""
    limit, most = tuning.plan.limits.p99_ms, tuning.plan.document["max_batch_size"]
    fitting = {rows: one for rows, one in tuning.sizes.items() if one.p99_ms <= limit}
    if not fitting:
        return f"no batch answers within {limit:g} ms"
    rows = max(fitting, key=lambda rows: fitting[rows].throughput)
    text = f"within {limit:g} ms: the most rows/s with batches of {rows}"
    return (
        text if rows == most or not most else f"{text}; max_batch_size is {most}: set it to {rows}"
    )


def tuning_entry(tuning: Tuning) -> JsonObject:
    """Return the entry of this machine in tuned.json."""
    plan, choice = tuning.plan, tuning.choice()
    return {
        "machine": tuned_settings.machine_facts(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "conditions": {
            "inputs": tuning.inputs,
            "batch": tuning.batch,
            "max_error": plan.limits.error,
            "max_p99_ms": None if math.isinf(plan.limits.p99_ms) else plan.limits.p99_ms,
            "for": plan.goal.value,
            "rounds": plan.rounds,
            "seconds": SECONDS,
            "allowed": asdict(plan.allowed),
        },
        "chosen": choice
        and {
            "parameters": dict(choice.candidate.parameters),
            "instances": choice.candidate.instances,
            "latency_ms": choice.latency_ms,
            "latency_gain": choice.latency_gain,
            "throughput": choice.throughput,
            "throughput_gain": choice.throughput_gain,
        },
        "rows": [asdict(row) for row in tuning.rows],
        "sizes": {rows: figures._asdict() for rows, figures in tuning.sizes.items()},
    }
