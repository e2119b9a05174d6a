"""The command `torch-py-backend` and its subcommands."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

import torch_py_backend
from torch_py_backend.cli.check import check
from torch_py_backend.cli.init import init
from torch_py_backend.cli.install import install
from torch_py_backend.cli.serve import serve
from torch_py_backend.cli.tune import tune
from torch_py_backend.config import removed_names
from torch_py_backend.errors import BackendError, ToolError

commands = typer.Typer(
    name="torch-py-backend",
    help="Serve PyTorch models on NVIDIA Triton Inference Server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(version: bool) -> None:  # noqa: FBT001  typer's signature
    if version:
        typer.echo(f"torch-py-backend {torch_py_backend.__version__}")
        raise typer.Exit


@commands.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options before the name of a subcommand."""


for _command in (serve, init, check, tune, install):
    commands.command()(_command)


def app() -> None:
    """Run the command line; print an error as one line, with exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of models in any encoding
    try:
        words = [word.partition("=")[0] for word in sys.argv]
        advice = removed_names.advice("command", words[1:2]) or removed_names.advice("flag", words)
        if advice:
            raise ToolError(advice)
        commands()
    except (BackendError, OSError) as error:
        typer.echo(f"{typer.style('error:', fg='red')} {error}", err=True)
        sys.exit(1)
