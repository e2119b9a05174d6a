"""`torch-py-backend tune`: measure ways to run a model, and print options for config.pbtxt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torch_py_backend import autocomplete
from torch_py_backend.config import pbtxt, repository
from torch_py_backend.errors import ConfigError, about
from torch_py_backend.model_folders import tuning


def tune(
    model: Annotated[Path, typer.Argument(help="The model's folder.")],
    reduced_precision: Annotated[
        bool, typer.Option("--reduced-precision", help="Also try 16-bit types.")
    ] = False,
) -> None:
    """Measure ways to run a model; print the options of the fastest one for config.pbtxt."""
    folder = model.resolve() if ".." in model.parts else model.absolute()
    with about(folder.name):
        document = pbtxt.read(folder)
        version = repository.latest(folder, document)
        if document.get("model_transaction_policy", {}).get("decoupled"):
            raise ConfigError("the model is decoupled", expected="one response for each request")
        if autocomplete.is_incomplete(document):
            autocomplete.complete(pbtxt.arguments(folder, version, document), document)
        full = max(1, document["max_batch_size"])
        typer.echo(f"ms: one row; rows/s: batches of {full} rows; one instance of each")
        typer.echo(tuning.TITLES)
        rows = []
        for row in tuning.candidates(folder, version, document, reduced=reduced_precision):
            rows.append(row)
            typer.echo(f"{row.title:24}{row.text}")
    choice = max(rows, key=lambda row: row.gain)
    if choice.gain < tuning.LEAST_GAIN:
        typer.echo("nothing is faster than the model as configured")
        return
    typer.echo(f"fastest: {choice.title}; set in {folder / 'config.pbtxt'}, in place of")
    typer.echo(f"{', '.join(tuning.TUNED)} there:")
    for line in pbtxt.lines("parameters", pbtxt.parameters(choice.parameters)):
        typer.echo(line)
