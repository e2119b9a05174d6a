"""EXECUTION_ENV_PATH: the Python environment of a model, and its version of Python.

Triton unpacks the archive (or uses a folder in place), sources its bin/activate, and then starts
its stub. A stub is built for one minor version of Python. In an environment for another version it
finds no packages, and silently imports those that are installed elsewhere.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from torch_py_backend.errors import PlatformError

KEY = "EXECUTION_ENV_PATH"


def check_running_python(*, is_named: bool) -> None:
    """Raise PlatformError if packages are missing, or the environment is for another Python."""
    # Every bin/activate, also conda's, puts its folder first.
    folder = Path(os.environ.get("PATH", "").partition(os.pathsep)[0]).parent
    versions = [path.name.removeprefix("python") for path in folder.glob("lib*/python3.*")]
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if is_named and versions and running not in versions:
        raise PlatformError(
            f"{KEY} names an environment for Python {versions[0]}, and the server's stub runs"
            f" Python {running}",
            cure=f"Make the environment with Python {running}, or put a stub for the other one,"
            " named triton_python_backend_stub, into the model's folder.",
        )
    imported = ("torch", "numpy", "safetensors")
    missing = [name for name in imported if importlib.util.find_spec(name) is None]
    if missing:
        raise PlatformError(
            f"{sys.executable}, which Triton's stub runs, has no {' and no '.join(missing)}",
            cure=f"Run {sys.executable} -m pip install {' '.join(missing)}.",
        )
