"""`torch-py-backend install`: write the backend into the backend directory of a tritonserver."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torch_py_backend.server import installation, triton_installation


def install(
    backend_dir: Annotated[
        Path, typer.Option(help="The server's backend directory.")
    ] = triton_installation.NGC / "backends",
    name: Annotated[
        str,
        typer.Option(
            help="The backend's name in config.pbtxt; `pytorch` serves repositories made for"
            " the LibTorch backend unchanged."
        ),
    ] = "pytorch_py",
    create: Annotated[
        bool,
        typer.Option(
            "--create", help="Create the folder, or accept one that is not a backend directory yet."
        ),
    ] = False,
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Remove the backend.")] = False,
) -> None:
    """Install the backend into a tritonserver's backend directory."""
    console = Console(soft_wrap=True, highlight=False, emoji=False)
    if not uninstall:
        if not create:
            installation.check_backend_directory(backend_dir)
        console.print(f"installed {installation.install(backend_dir, name)}")
    elif installation.uninstall(backend_dir, name):
        console.print(f"removed {backend_dir / name}")
    else:
        console.print(f"nothing to remove: {backend_dir / name} does not exist")
