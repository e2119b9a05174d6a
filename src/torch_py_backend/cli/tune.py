"""`torch-py-backend tune`: measure ways to run a model, and print options for config.pbtxt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from torch_py_backend import autocomplete, files
from torch_py_backend.config import pbtxt, repository
from torch_py_backend.errors import ToolError, about
from torch_py_backend.model_folders import tuning

# Title, figure and format of each column.
_COLUMNS = (
    ("ms", "latency_ms", ".3g"),
    ("gain", "latency_gain", ".2f"),
    ("rows/s", "throughput", ",.0f"),
    ("gain", "throughput_gain", ".2f"),
    ("READY s", "ready_s", ".1f"),
    ("error", "error", ".1g"),
)


def tune(
    model: Annotated[Path, typer.Argument(help="The model's folder.")],
    reduced_precision: Annotated[
        bool, typer.Option("--reduced-precision", help="Also try 16-bit types.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Append the options to config.pbtxt.")
    ] = False,
) -> None:
    """Measure ways to run a model; print the options of the fastest one for config.pbtxt."""
    folder = model.resolve()
    with about(folder.name):
        document = pbtxt.read(folder)
        version = repository.latest(folder, document)
        if document.get("model_transaction_policy", {}).get("decoupled"):
            raise ToolError(
                "the model is decoupled; expected one with a response for each request."
            )
        if autocomplete.is_incomplete(document):
            autocomplete.complete(pbtxt.arguments(folder, version, document), document)
        full = max(1, document["max_batch_size"])
        typer.echo(f"ms: one row; rows/s: batches of {full} rows; one instance of each")
        _print_row("candidate", [title for title, _, _ in _COLUMNS])
        rows = []
        for row in tuning.candidates(folder, version, document, reduced=reduced_precision):
            rows.append(row)
            figures = [format(row.figures[key], shown) for _, key, shown in _COLUMNS if row.figures]
            _print_row(row.title, figures or [row.failure])
    limit = tuning.MAX_ERROR_REDUCED if reduced_precision else tuning.MAX_ERROR
    choice = tuning.best(rows[1:], limit)
    if choice is None:
        typer.echo("nothing is faster than the model as configured; config.pbtxt is as it was")
        return
    latency, throughput = choice.figures["latency_gain"], choice.figures["throughput_gain"]
    typer.echo(f"fastest: {choice.title} ({latency:.2f} in latency, {throughput:.2f} in rows/s)")
    lines = pbtxt.lines("parameters", pbtxt.parameters(choice.parameters))
    config = (folder / "config.pbtxt").resolve()
    if is_set := [key for key in tuning.TUNED if key in document["parameters"]]:
        done = f"to be set by hand in {config}, which has {', '.join(is_set)}"
    elif write:
        done = f"appended to {config}"
        text = "\n".join([pbtxt.text(folder).rstrip(), *lines, ""])
        files.replace(config, text.encode())
    else:
        done = f"for {config}"
    typer.echo("\n".join([f"{done}:", *lines]))


def _print_row(title: str, columns: Sequence[str]) -> None:
    typer.echo("".join([f"{title:24}", *(f"{text:>8}" for text in columns)]))
