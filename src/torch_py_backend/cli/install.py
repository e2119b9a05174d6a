"""`torch-py-backend install`: write the backend into the backend directory of a tritonserver."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from torch_py_backend.config import execution_env
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
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Remove the backend.")] = False,
) -> None:
    """Install the backend into a tritonserver's backend directory."""
    console = Console(soft_wrap=True, highlight=False, emoji=False)
    if not uninstall:
        console.print(f"installed {installation.install(backend_dir, name)}")
        for warning in _missing_packages():
            console.print(f"[yellow]warning[/] {escape(warning)}")
        console.print("next: torch-py-backend init FILE --repository=models")
        console.print(f"tritonserver --model-repository=models --backend-directory={backend_dir}")
    elif installation.uninstall(backend_dir, name):
        console.print(f"removed {backend_dir / name}")
    else:
        console.print(f"nothing to remove: {backend_dir / name} does not exist")


def _missing_packages() -> list[str]:
    """Return a sentence for each package that the Python of Triton's stub does not find."""
    python = shutil.which("python3")
    if python is None:
        return ["there is no python3 on PATH; Triton's stub runs it."]
    code = "import importlib.util, sys; print(*filter(importlib.util.find_spec, sys.argv[1:]))"
    command = [python, "-c", code, *execution_env.PACKAGES]
    # In another folder, whose modules are not found.
    done = subprocess.run(command, cwd="/", stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    return [
        f"{python}, which Triton's stub runs, has no {name}; run {python} -m pip install {name}."
        for name in execution_env.PACKAGES
        if name not in done.stdout.split()
    ]
