"""Puts the backend where a tritonserver looks for it: the shim, and this package beside it."""

from __future__ import annotations

import compileall
import contextlib
import errno
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch_py_backend.errors import InstallError

PACKAGE = Path(__file__).parents[1]
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SILENT = 2
_PYTHON = Path("python", "libtriton_python.so")
# The same lines as backends/pytorch_py/model.py in the repository; a test keeps them equal.
SHIM = '''"""What Triton loads for `backend: "pytorch_py"`; the code is in torch_py_backend."""

import os
import sys

# The package that `install` puts beside this file wins over one in site-packages.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from torch_py_backend.adapter import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def install(backends: Path, name: str) -> Path:
    """Write the backend folder `backends/name`; one of ours that is there is replaced.

    The folder is made complete under another name and then moved into place, so that a server
    never sees half of it.

    Raises:
        InstallError: something else lies there, or the folder cannot be written.
    """
    target = _target(backends, name)
    with _telling(f"cannot install into {backends}"):
        backends.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=backends))
        try:
            _write(staging / name)
            _replace(staging / name, target, retired=staging / "retired")
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def check(backends: Path) -> None:
    """Refuse a folder from which no tritonserver loads its backends.

    Raises:
        InstallError: it is no folder, or Triton's own Python backend is not in it.
    """
    if (backends / _PYTHON).is_file():
        return
    found = f"has no {_PYTHON}" if backends.is_dir() else "is not a folder"
    raise InstallError(
        f"{backends} {found}; expected the backend directory of a tritonserver. Name it with"
        " --backend-dir, or add --create to install there all the same."
    )


def uninstall(backends: Path, name: str) -> bool:
    """Remove the backend folder `backends/name`; False: there was none.

    Raises:
        InstallError: what lies there is not ours, or cannot be removed.
    """
    target = _target(backends, name)
    if not target.exists():
        return False
    with _telling(f"cannot remove {target}"):
        if target.is_symlink():
            target.unlink()
        else:
            shutil.rmtree(target)
    return True


def _target(backends: Path, name: str) -> Path:
    """The folder to write or remove: absent, empty or ours, that is, with our package in it."""
    if not _NAME.fullmatch(name):
        raise InstallError(f"--name is '{name}'; expected letters, digits, _ and -.")
    target = backends / name
    library = target / f"libtriton_{name}.so"
    if library.exists():
        raise InstallError(
            f"{target} holds {library.name}, and Triton prefers that to any model.py. Install"
            " into another folder (--backend-dir) and start the server with"
            " --backend-directory, or move that folder away first."
        )
    empty = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if not empty and not (target / PACKAGE.name).is_dir():
        raise InstallError(f"{target} is not ours. Choose another --name, or remove it first.")
    return target


def _write(folder: Path) -> None:
    # Less what another Python is writing there just now, under a name of its own.
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("*.pyc.*"))
    (folder / "model.py").write_text(SHIM, encoding="utf-8")
    # Here, and what was not copied with the package: a server that may not write into its backends,
    # or is told not to by PYTHONDONTWRITEBYTECODE, would compile it for each instance anew.
    compileall.compile_dir(folder, quiet=_SILENT)
    # A server may run as another user, whoever installs, and with whatever umask.
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _replace(staged: Path, target: Path, retired: Path) -> None:
    if target.exists():
        try:
            target.rename(retired)
        except OSError as error:
            # Image layers: overlayfs does not move a folder that came from a lower layer.
            if error.errno != errno.EXDEV:
                raise
            shutil.rmtree(target)
    try:
        staged.rename(target)
    except OSError:
        if retired.exists():
            retired.rename(target)
        raise


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # shutil.Error, one of them, holds several in its arguments
        raise InstallError(f"{what}: {error}") from error
