"""`torch-py-backend pack`: pack a Python environment that one model is served with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torch_py_backend.config import execution_env
from torch_py_backend.errors import PackError, ServerError
from torch_py_backend.server import preflight, tritonserver
from torch_py_backend.tools import packing
from torch_py_backend.tools.packing import Environment, Kind, Packed

_MEGABYTE = 1 << 20


def pack(
    env: Annotated[Path, typer.Argument(help="A virtual environment, or one of conda.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The archive; by default ENV's name and .tar.gz."),
    ] = None,
    python: Annotated[
        str,
        typer.Option(
            help="The Python of the server's stub, such as 3.12; else that of the server here."
        ),
    ] = "",
) -> None:
    """Pack a Python environment for EXECUTION_ENV_PATH, with the packages of one model."""
    stub_python, numpy_1 = _stub_python(python)
    environment = packing.inspect(env)
    packing.check(environment, stub_python, numpy_1=numpy_1)
    path = output or Path(f"{environment.folder.name}{packing.SUFFIX}")
    console = Console(soft_wrap=True, highlight=False, emoji=False, markup=False)
    with console.status(f"packing {env}"):
        packed = packing.write(environment, path)
    for line in _lines(environment, packed):
        console.print(line)


def _stub_python(python: str) -> tuple[str, bool]:
    """Return the Python version of the server's stub, and whether numpy must be older than 2."""
    if python:
        if not re.fullmatch(r"3\.\d+", python):
            raise PackError(f"--python is '{python}'; expected a version such as 3.12.")
        return python, False
    try:
        triton = tritonserver.find()
        return tritonserver.stub_python(triton), preflight.corrupts_numpy_2(triton)
    except ServerError as error:
        raise PackError(
            f"the Python of the server's stub is not known: {error} Or name it: --python 3.12."
        ) from None


def _lines(environment: Environment, packed: Packed) -> list[str]:
    versions = ", ".join(f"{name} {environment.packages[name]}" for name in packing.NEEDED)
    size, unpacked = (f"{size / _MEGABYTE:,.1f} MB" for size in (packed.size, packed.unpacked))
    value = f"{execution_env.MODEL_FOLDER}/{packed.path.name}"
    lines = [
        f"packed {packed.path}: {size}, unpacked {unpacked}",
        f"with Python {environment.python}, {versions}",
        "Put it into the model's folder, beside config.pbtxt, and add there:",
        f'parameters {{ key: "{execution_env.KEY}" value {{ string_value: "{value}" }} }}',
    ]
    if environment.kind is Kind.LAYER:
        lines.append(
            f"It is a layer: where it is served, {environment.executable} and the packages"
            " installed there must be the same."
        )
    return lines
