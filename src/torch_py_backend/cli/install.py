"""`torch-py-backend install`: write the backend into the backend directory of a tritonserver."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torch_py_backend.server import installation


def install(
    backend_dir: Annotated[
        Path, typer.Option(help="The server's backend directory.")
    ] = installation.NGC / "backends",
    name: Annotated[
        str,
        typer.Option(
            help="The backend's name in config.pbtxt; `pytorch` serves repositories made for"
            " the LibTorch backend unchanged."
        ),
    ] = "pytorch_py",
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Remove the backend.")] = False,
) -> None:
    """Install the backend into a tritonserver's backend directory."""
    if uninstall:
        is_removed = installation.uninstall(backend_dir, name)
        typer.echo(f"{'removed' if is_removed else 'there is no'} {backend_dir / name}")
        return
    typer.echo(f"installed {installation.install(backend_dir, name)}")
    typer.echo("next: torch-py-backend init FILE --repository=models")
    typer.echo(f"tritonserver --model-repository=models --backend-directory={backend_dir}")
