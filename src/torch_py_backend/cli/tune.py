"""`torch-py-backend tune`: measure ways to run a model, and print options for config.pbtxt."""

from __future__ import annotations

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
from torch_py_backend.errors import ToolError, about
from torch_py_backend.model_folders import trial, tuning
from torch_py_backend.model_folders.tuning import Row

_WIDE_SPREAD = 0.1
_WIDTH = 100  # of the table, if the output is not a terminal
# Title, field of a row and format of each column.
_COLUMNS = (
    ("ms", "latency_ms", ".3g"),
    ("gain", "latency_gain", ".2f"),
    ("rows/s", "throughput", ",.0f"),
    ("gain", "throughput_gain", ".2f"),
    ("±", "spread", ".0%"),
    ("READY s", "ready_s", ".1f"),
    ("error", "error", ".1g"),
)


def tune(
    model: Annotated[Path, typer.Argument(help="The model's folder.")],
    reduced_precision: Annotated[
        bool, typer.Option("--reduced-precision", help="Also try 16-bit types.")
    ] = False,
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
    folder = model.resolve()
    errors = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
    rows: list[Row] = []
    with about(folder.name), errors.status("measuring"):
        version, document = trial.read(folder)
        if document.get("model_transaction_policy", {}).get("decoupled"):
            raise ToolError(
                "the model is decoupled; expected one with a response for each request."
            )
        if completion.is_incomplete(document):
            completion.complete(pbtxt.arguments(folder, version, document), document)
        for row in tuning.candidates(folder, version, document, timeout, reduced=reduced_precision):
            rows.append(row)
            text = row.failure or f"{row.latency_gain:.2f}, {row.throughput_gain:.2f}"
            errors.print(f"{row.title}: {text}", markup=False)
    console = Console(highlight=False, emoji=False, soft_wrap=True, markup=False)
    _print_figures(console, rows, max(1, document["max_batch_size"]))
    limit = tuning.MAX_ERROR_REDUCED if reduced_precision else tuning.MAX_ERROR
    choice = tuning.best(rows[1:], limit)
    if choice is None:
        console.print("nothing is faster than the model as configured; config.pbtxt is as it was")
        return
    gain = f"{choice.latency_gain:.2f} in latency, {choice.throughput_gain:.2f} in rows/s"
    console.print(f"fastest: {choice.title} ({gain})")
    is_set = [key for key in tuning.TUNED if key in document["parameters"]]
    lines = [pbtxt.parameter(key, text) for key, text in choice.parameters.items()]
    if write and not is_set:
        _append(folder, lines)
    done = "appended to" if write and not is_set else "for"
    console.print(f"{done} {folder / 'config.pbtxt'}:", *lines, sep="\n")
    if is_set:
        console.print(f"set already, to be replaced or removed by hand: {', '.join(is_set)}")


def _print_figures(console: Console, rows: Sequence[Row], full: int) -> None:
    """Print the table, the failures, and a note if the figures are doubtful."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("candidate", min_width=12, no_wrap=True)
    for title, _, _ in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        figures = [format(getattr(row, field), shown) for _, field, shown in _COLUMNS]
        table.add_row(escape(row.title), *([] if row.failure else figures))
    width = console.width if console.is_terminal else max(console.width, _WIDTH)
    console.print(table, soft_wrap=False, width=width)
    console.print(f"ms: one row; rows/s: batches of {full} rows; one instance of each")
    for row in rows:
        if row.failure:
            console.print(f"{row.title}: {row.failure}")
    if any(row.spread > _WIDE_SPREAD for row in rows):
        console.print("the rounds differ widely (±); measure again on a quiet machine")


def _append(folder: Path, lines: Sequence[str]) -> None:
    """Append lines to config.pbtxt."""
    path = folder / "config.pbtxt"
    try:
        text = "\n".join([pbtxt.text(folder).rstrip(), *lines, ""])
        files.replace(path.resolve(), text.encode())  # the whole file, or nothing
    except OSError as error:
        raise ToolError(f"cannot write {path}: {error.strerror or error}.") from error
