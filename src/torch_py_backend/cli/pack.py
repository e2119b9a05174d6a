"""`torch-py-backend pack`: pack a Python environment for one model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torch_py_backend.config import execution_env, pbtxt
from torch_py_backend.errors import ServerError, ToolError
from torch_py_backend.server import preflight, triton_installation
from torch_py_backend.tools import packing

_MEGABYTE = 1 << 20


def pack(
    env: Annotated[Path, typer.Argument(help="A virtual environment or a conda environment.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The archive; by default ENV's name and .tar.gz."),
    ] = None,
    python: Annotated[
        str,
        typer.Option(
            help="Python version of the server's stub, such as 3.12; by default that of the server"
            " here."
        ),
    ] = "",
) -> None:
    """Pack a Python environment for EXECUTION_ENV_PATH, with the packages of one model."""
    stub_python, numpy_1 = python, False
    if not python:
        try:
            triton = triton_installation.find()
            stub_python = triton_installation.stub_python(triton)
            numpy_1 = preflight.corrupts_numpy_2(triton)
        except ServerError as error:
            raise ToolError(
                f"the Python of the server's stub is not known: {error} Or name it: --python 3.12."
            ) from None
    elif not re.fullmatch(r"3\.\d+", python):
        raise ToolError(f"--python is '{python}'; expected a version such as 3.12.")
    environment = packing.inspect(env)
    packing.check(environment, stub_python, numpy_1=numpy_1)
    path = (output or Path(f"{environment.folder.name}{packing.SUFFIX}")).absolute()
    console = Console(soft_wrap=True, highlight=False, emoji=False, markup=False)
    with console.status(f"packing {env}"):
        packing.write(environment, path)
    versions = ", ".join(f"{name} {environment.packages[name]}" for name in packing.NEEDED)
    value = f"{execution_env.MODEL_FOLDER}/{path.name}"
    console.print(f"packed {path}: {path.stat().st_size / _MEGABYTE:,.1f} MB")
    console.print(f"with Python {environment.python}, {versions}")
    console.print("Put it into the model's folder, beside config.pbtxt, and add there:")
    console.print(pbtxt.parameter(execution_env.KEY, value))
    if environment.kind == "layer":
        console.print(
            f"It is a layer: the server's machine must have the same {environment.executable} with"
            " the same packages."
        )
    if any(environment.folder.glob(packing.CONDA_SCRIPTS)):
        console.print(
            f"Servers from 25.08 on do not run its scripts {packing.CONDA_SCRIPTS}: set the"
            " variables that they set for the server itself."
        )
