"""Installation of the backend into the backend directory of a tritonserver."""

from __future__ import annotations

import compileall
import re
import shutil
import tempfile
from pathlib import Path

from torch_py_backend.errors import ToolError

PACKAGE = Path(__file__).parents[1]
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_QUIET = 2  # compileall prints no errors
# The same as backends/pytorch_py/model.py in the repository; a test compares them.
SHIM = '''"""What Triton loads for `backend: "pytorch_py"`; the code is in torch_py_backend."""

import os
import sys

# The package that `install` puts beside this file wins over one in site-packages.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from torch_py_backend.adapter import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def install(backends: Path, name: str) -> Path:
    """Write the backend folder `backends/name`, and return its path.

    An earlier installation is replaced, once the new one is complete under a temporary name.

    Raises:
        ToolError: there is no such backend directory, it cannot be written, or the folder holds
            other files.
    """
    if not backends.is_dir():
        raise ToolError(
            f"{backends} is not a folder; expected the backend directory of a tritonserver. Name it"
            " with --backend-dir."
        )
    target = _target(backends, name)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=backends) as temporary:
            staged = Path(temporary, name)
            # Ignores the temporary files of other Python processes that compile the package.
            ignored = shutil.ignore_patterns("*.pyc.*")
            shutil.copytree(PACKAGE, staged / PACKAGE.name, ignore=ignored)
            (staged / "model.py").write_text(SHIM, encoding="utf-8")
            # A server that cannot write to its backends, or runs with PYTHONDONTWRITEBYTECODE,
            # would otherwise compile the package for each instance.
            compileall.compile_dir(staged, quiet=_QUIET)
            # The server may run as another user. The umask of this process must not matter.
            for path in (staged, *staged.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
            if target.exists():
                shutil.rmtree(target)
            staged.rename(target)
    except OSError as error:  # or shutil.Error, which holds a list of errors
        raise ToolError(f"cannot install into {backends}: {error}") from error
    return target


def uninstall(backends: Path, name: str) -> bool:
    """Remove the backend folder `backends/name`; return whether it existed.

    Raises:
        ToolError: the folder holds other files, or cannot be removed.
    """
    target = _target(backends, name)
    if not target.exists():
        return False
    try:
        shutil.rmtree(target)
    except OSError as error:
        raise ToolError(f"cannot remove {target}: {error}") from error
    return True


def _target(backends: Path, name: str) -> Path:
    """Return the backend folder, after checking that it may be written or removed.

    It may if it does not exist, is empty, or holds this package.
    """
    if not _NAME.fullmatch(name):
        raise ToolError(f"--name is '{name}'; expected letters, digits, _ and -.")
    target = backends / name
    is_empty = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    is_ours = (target / PACKAGE.name).is_dir() and not (target / f"libtriton_{name}.so").exists()
    if not is_empty and not is_ours:
        raise ToolError(
            f"{target} holds files that are not of this backend. Choose another --name or"
            " --backend-dir, or remove it first: Triton prefers a library to any model.py."
        )
    return target
