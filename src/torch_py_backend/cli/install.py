"""`torch-py-backend install`: write the backend into the backend directory of a tritonserver."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from torch_py_backend.config import execution_env
from torch_py_backend.server import installation

# Prints which packages Python finds.
_FIND = "import importlib.util, sys; print(*filter(importlib.util.find_spec, sys.argv[1:]))"


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
    # In another folder, whose modules are not found.
    found = subprocess.run(  # noqa: S603
        ["/usr/bin/env", "python3", "-c", _FIND, *execution_env.PACKAGES],
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    ).stdout.split()
    if missing := [name for name in execution_env.PACKAGES if name not in found]:
        typer.echo(
            "warning: the first python3 on PATH, which Triton's stub runs, has no"
            f" {', '.join(missing)}; install it there with python3 -m pip install."
        )
    typer.echo("next: torch-py-backend init FILE --repository=models")
    typer.echo(f"tritonserver --model-repository=models --backend-directory={backend_dir}")
