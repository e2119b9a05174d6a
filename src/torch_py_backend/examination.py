"""What a server would meet on this machine: Python, numpy, shared memory, files in the way."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from torch_py_backend import environments, pbtxt, server
from torch_py_backend.errors import BackendError, ServerError
from torch_py_backend.server import Triton

# One region of 1 MB for each instance, and more for larger tensors.
_SHARED_MEMORY_BYTES = 256 << 20


def environment() -> Iterator[str]:
    """Problems of this machine, one sentence each, with their cure."""
    yield from _server()
    for name in ("torch", "numpy", "safetensors"):
        if importlib.util.find_spec(name) is None:
            yield f"{name} is not installed in this Python; pip install {name}."
    size = shutil.disk_usage("/dev/shm").total  # noqa: S108  where Triton keeps its regions
    if size < _SHARED_MEMORY_BYTES:
        yield (
            f"the shared memory has {size >> 20} MB, and tensors pass through it; give the"
            " container more (--shm-size=1g)."
        )
    if Path("model.py").is_file():
        yield (
            "model.py in this folder shadows the backend's when a tritonserver is started here;"
            " start it from another folder (`torch-py-backend serve` does)."
        )


def _server() -> Iterator[str]:
    try:
        triton = server.find()
        server.environment(triton)
    except ServerError as error:
        yield str(error)
        return
    if garbles_numpy_2(triton) and _major("numpy") >= 2:  # noqa: PLR2004
        yield (
            f"numpy {metadata.version('numpy')} garbles tensors in the wheel's tritonserver;"
            " pip install 'numpy<2'."
        )


def garbles_numpy_2(triton: Triton) -> bool:
    """Whether the stub is known to: the wheel's is of 24.10; others tell when a model loads."""
    return "pytriton" in triton.executable.parts


def execution_environment(path: Path, document: Mapping[str, Any]) -> None:
    """Look at the Python environment that a model's config names, if it does.

    Raises:
        PlatformError: it is not there, or not for the Python of this machine's server.
    """
    try:
        stub = server.stub_python(server.find())
    except ServerError:
        stub = ""  # `environment` tells
    environments.check(path, document, stub)


def _major(distribution: str) -> int:
    try:
        return int(metadata.version(distribution).partition(".")[0])
    except metadata.PackageNotFoundError:
        return 0


def folder(path: Path) -> Iterator[str]:
    """Problems of a model folder that no load would show."""
    if not os.access(path, os.R_OK | os.X_OK):
        yield f"{path} cannot be read by this user."
        return
    try:
        document = pbtxt.read(path)
    except BackendError:
        document = {"backend": ""}  # and the load will say why it cannot be read
    if environments.named(document):
        yield (
            f"{path.name}: {environments.KEY} names an environment for this model; here it is tried"
            f" without that, with the packages of {sys.prefix}."
        )
    if not document["backend"]:
        yield (
            f"{path.name}: config.pbtxt has no `backend`, so Triton takes its own for what it"
            ' finds; add backend: "pytorch_py", or install with --name pytorch.'
        )


def waits(document: Mapping[str, Any]) -> Iterator[str]:
    """What one instance on a GPU leaves undone, of a model with hooks."""
    groups = document["instance_group"]
    if any(group["kind"] == "KIND_GPU" and group["count"] == 1 for group in groups):
        yield (
            "one instance: its GPU waits while hooks run. A second one (count: 2 in instance_group)"
            " prepares a batch meanwhile; `torch-py-backend tune` measures whether that pays."
        )
