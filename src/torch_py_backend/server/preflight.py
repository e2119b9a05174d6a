"""What a server would meet on this machine: Python, numpy, shared memory, files in the way."""

from __future__ import annotations

import difflib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from torch_py_backend.config import execution_env, pbtxt
from torch_py_backend.errors import BackendError, ConfigError, ServerError
from torch_py_backend.server import tritonserver
from torch_py_backend.server.tritonserver import Triton

# One region of 1 MB for each instance, and more for larger tensors.
_SHARED_MEMORY_BYTES = 256 << 20
# What this backend is called in a config: `pytorch` where it is installed under that name.
_OWN = {
    "backend": ("pytorch_py", "pytorch"),
    "platform": ("pytorch_libtorch", "pytorch", "torch_aoti"),
}
# A misspelling is at least this similar; "python" and "my_pytorch" are not.
_SIMILAR = 0.85


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
        triton = tritonserver.find()
        tritonserver.environment(triton)
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
        stub = tritonserver.stub_python(tritonserver.find())
    except ServerError:
        stub = ""  # `environment` tells
    execution_env.check(path, document, stub)


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
        return  # the load says why it cannot be read
    if execution_env.named(document):
        yield (
            f"{path.name}: {execution_env.KEY} names an environment for this model; here it is"
            f" tried without that, with the packages of {sys.prefix}."
        )
    if document["platform"] and not document["backend"]:
        yield (
            f"{path.name}: config.pbtxt has a `platform` and no `backend`, so Triton takes the"
            ' backend of that platform; add backend: "pytorch_py", or install with --name pytorch.'
        )


def other_backend(path: Path, document: Mapping[str, Any]) -> str:
    """Return the other backend or platform that a config names; empty: this backend serves it.

    Raises:
        ConfigError: the config names neither, or a misspelling of this backend.
    """
    for key, own in _OWN.items():
        name = document[key]
        if not name or name in own:
            continue
        similar = difflib.get_close_matches(name.lower(), own, n=1, cutoff=_SIMILAR)
        if similar:
            raise ConfigError(
                path.name,
                f"the {key} is '{name}'",
                cure=f"Did you mean {similar[0]}? Correct it in config.pbtxt.",
            )
        return str(name)
    if not document["backend"] and not document["platform"]:
        exists = (path / "config.pbtxt").is_file()
        raise ConfigError(
            path.name,
            "config.pbtxt has no `backend`" if exists else "config.pbtxt is missing",
            expected='the line backend: "pytorch_py"',
            cure="Add it to config.pbtxt." if exists else "Write config.pbtxt with that line.",
        )
    return ""


def waits(document: Mapping[str, Any]) -> Iterator[str]:
    """What one instance on a GPU leaves undone, of a model with hooks."""
    groups = document["instance_group"]
    if any(group["kind"] == "KIND_GPU" and group["count"] == 1 for group in groups):
        yield (
            "one instance: its GPU waits while hooks run. A second one (count: 2 in instance_group)"
            " prepares a batch meanwhile; `torch-py-backend tune` measures whether that pays."
        )
