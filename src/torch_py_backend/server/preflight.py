"""Checks of this machine and of model folders before a server starts."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_py_backend.config import execution_env, pbtxt
from torch_py_backend.errors import BackendError, ConfigError, ToolError
from torch_py_backend.server import triton_installation

# Each instance needs a region of 1 MB, and more for larger tensors.
_SHARED_MEMORY_BYTES = 256 << 20
# Names of this backend in a config: `pytorch` if it is installed under that name.
_BACKENDS, _PLATFORMS = ("pytorch_py", "pytorch"), ("pytorch_libtorch", "pytorch", "torch_aoti")
# The similarity of a misspelling; "python" and "my_pytorch" are less similar.
_SIMILARITY = 0.85


def machine_problems() -> Iterator[str]:
    """Yield the problems of this machine, one sentence each, with their cure."""
    try:
        triton_installation.environment(triton_installation.find())
    except ToolError as error:
        yield str(error)
    size = shutil.disk_usage("/dev/shm").total  # noqa: S108  Triton's regions
    if size < _SHARED_MEMORY_BYTES:
        yield (
            f"the shared memory has {size >> 20} MB, and tensors pass through it; give the"
            " container more (--shm-size=1g)."
        )


def folder_problems(path: Path) -> Iterator[str]:
    """Yield the problems of a model folder that loading the model does not show."""
    if not os.access(path, os.R_OK | os.X_OK):
        yield f"{path} cannot be read by this user."
        return
    try:
        document = pbtxt.read(path)
    except BackendError:
        return  # reported when the model is loaded
    if execution_env.environment_path(document):
        yield (
            f"{path.name}: {execution_env.KEY} names an environment for this model; here it is"
            f" tried without that, with the packages of {sys.prefix}."
        )


def other_backend(path: Path, document: Mapping[str, Any]) -> str:
    """Return the other backend or platform that a config names; empty for this backend.

    Raises:
        ConfigError: the config names neither, or a misspelling of this backend.
    """
    for key, names in (("backend", _BACKENDS), ("platform", _PLATFORMS)):
        name = str(document[key])
        if not name or name in names:
            continue
        # The name of the package is taken for that of the backend.
        known = {known: known for known in names} | {"torch_py_backend": names[0]}
        for similar in difflib.get_close_matches(name.lower(), known, n=1, cutoff=_SIMILARITY):
            raise ConfigError(
                f"the {key} is '{name}'",
                cure=f"Did you mean {known[similar]}? Correct it in config.pbtxt.",
            )
        return name
    if not document["backend"] and not document["platform"]:
        exists = (path / "config.pbtxt").is_file()
        raise ConfigError(
            "config.pbtxt has no `backend`" if exists else "config.pbtxt is missing",
            expected='the line backend: "pytorch_py"',
            cure="Add it to config.pbtxt." if exists else "Write config.pbtxt with that line.",
        )
    return ""
