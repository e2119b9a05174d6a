"""`torch-py-backend tune`: measure ways to run a model, and print options for config.pbtxt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_py_backend import files
from torch_py_backend.autocomplete import completion
from torch_py_backend.config import pbtxt
from torch_py_backend.config.pbtxt import Document
from torch_py_backend.errors import ToolError, about
from torch_py_backend.model_folders import trial, tuning
from torch_py_backend.model_folders.tuning import Row

_MAX_ERROR, _MAX_ERROR_REDUCED = 1e-4, 0.03
_WIDE_SPREAD = 0.1
_WIDTH = 100  # of the table, if the output is not a terminal
# Title, field of a row and format of each column.
_COLUMNS = (
    ("ms", "latency_ms", ".3g"),
    ("gain", "latency_gain", ".2f"),
    ("rows/s", "throughput", ",.0f"),
    ("gain", "throughput_gain", ".2f"),
    ("±", "spread", ".0%"),
    ("cores", "cores", ".1f"),
    ("READY s", "ready_s", ".1f"),
    ("error", "error", ".1g"),
)


def tune(
    model: Annotated[Path, typer.Argument(help="The model's folder.")],
    reduced_precision: Annotated[
        bool, typer.Option("--reduced-precision", help="Also try 16-bit types.")
    ] = False,
    max_error: Annotated[
        float | None,
        typer.Option(
            help="The largest accepted difference from the outputs as configured, relative to"
            f" their values. By default {_MAX_ERROR:g}; with --reduced-precision"
            f" {_MAX_ERROR_REDUCED:g}."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Time limit of each candidate, in seconds.")
    ] = 600.0,
    write: Annotated[
        bool, typer.Option("--write", help="Append the options to config.pbtxt.")
    ] = False,
) -> None:
    """Measure ways to run a model; print the options of the fastest one for config.pbtxt."""
    if not model.is_dir():
        raise ToolError(f"{model} is not a folder; expected a model's folder.")
    if max_error is None:
        max_error = _MAX_ERROR_REDUCED if reduced_precision else _MAX_ERROR
    if not (math.isfinite(max_error) and max_error >= 0):
        raise ToolError(f"--max-error is {max_error:g}; expected a number of at least 0, as 1e-4.")
    folder = model.resolve()
    errors = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
    rows: list[Row] = []
    with about(folder.name), errors.status("measuring the model as configured") as status:
        version, document = trial.read(folder)
        if completion.is_incomplete(document):
            completion.complete(pbtxt.arguments(folder, version, document), document)
        if document.get("model_transaction_policy", {}).get("decoupled"):
            raise ToolError(
                "the model is decoupled; expected one with a response for each request."
            )
        for row in tuning.measure(folder, version, document, timeout, reduced=reduced_precision):
            rows.append(row)
            status.update("measuring the candidates")
            text = row.failure or f"{row.latency_gain:.2f}, {row.throughput_gain:.2f}"
            errors.print(f"{row.runtime.title}: {text}", markup=False)
    console = Console(highlight=False, emoji=False, soft_wrap=True, markup=False)
    _print_figures(console, rows, max(1, document["max_batch_size"]))
    choice = tuning.best(rows[1:], max_error)
    if choice is None:
        console.print("nothing is faster than the model as configured; config.pbtxt is as it was")
        return
    gain = f"{choice.latency_gain:.2f} in latency, {choice.throughput_gain:.2f} in rows/s"
    console.print(f"fastest: {choice.runtime.title} ({gain}, with {choice.cores:.1f} cores)")
    _apply(console, folder, document, choice, write=write)


def _print_figures(console: Console, rows: Sequence[Row], full: int) -> None:
    """Print the table, the failures, and a note if the figures are doubtful."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("candidate", min_width=12, no_wrap=True)
    for title, _, _ in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        figures = [format(getattr(row, field), shown) for _, field, shown in _COLUMNS]
        table.add_row(escape(row.runtime.title), *([] if row.failure else figures))
    width = console.width if console.is_terminal else max(console.width, _WIDTH)
    console.print(table, soft_wrap=False, width=width)
    console.print(f"ms: one row; rows/s: batches of {full} rows; one instance of each")
    for row in rows:
        if row.failure:
            console.print(f"{row.runtime.title}: {row.failure}")
    if any(row.spread > _WIDE_SPREAD for row in rows):
        console.print("the rounds differ widely (±); measure again on a quiet machine")


def _apply(console: Console, folder: Path, document: Document, choice: Row, *, write: bool) -> None:
    """Print the lines for config.pbtxt, or append them; keys that are set are only printed."""
    path = folder / "config.pbtxt"
    lines = [pbtxt.parameter(key, text) for key, text in choice.runtime.parameters.items()]
    conflicts = [key for key in tuning.TUNED if key in document.get("parameters", {})]
    appends = write and not conflicts
    if appends:
        text = "\n".join([pbtxt.text(folder).rstrip(), *lines, ""])
        try:
            files.replace(path.resolve(), text.encode())  # the whole file, or nothing
        except OSError as error:
            raise ToolError(f"cannot write {path}: {error.strerror or error}.") from error
    console.print(f"{'appended to' if appends else 'for'} {path}:", *lines, sep="\n")
    if conflicts:
        console.print(f"set already, to be replaced or removed by hand: {', '.join(conflicts)}")
