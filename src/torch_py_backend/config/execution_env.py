"""EXECUTION_ENV_PATH: where a model's own Python environment lies, and which Python it is for.

Triton unpacks the archive (a folder it takes as it is), sources its bin/activate, and starts its
stub then. A stub is built for one minor version of Python: in an environment for another it finds
nothing, and takes what is installed elsewhere instead, without a word.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_py_backend.errors import PlatformError

KEY = "EXECUTION_ENV_PATH"
# Triton's name for a model's folder.
MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
_LIBRARY = re.compile(r"(?:\./)?lib(?:64)?/python(3\.\d+)/.")


def named(document: Mapping[str, Any]) -> str:
    """What a config, as Triton's JSON, names as environment; empty where it names none."""
    entry: Mapping[str, str] = document.get("parameters", {}).get(KEY, {})
    return entry.get("string_value", "")


def refuse_another_python(model: str, environment: str) -> None:
    """Called in a stub: refuse to go on if its environment is for another Python.

    Args:
        model: the model's name.
        environment: what its config names.

    Raises:
        PlatformError: the environment is for another Python than this one.
    """
    if not environment:
        return
    # Every bin/activate, conda's too, puts its folder first.
    found = _in_folder(Path(os.environ.get("PATH", "").partition(os.pathsep)[0]).parent)
    runs = f"{sys.version_info.major}.{sys.version_info.minor}"
    if found and runs not in found:
        raise _another(model, min(found), runs)


def check(folder: Path, document: Mapping[str, Any], stub: str) -> None:
    """Look at the environment that a model's config names, without unpacking it.

    Args:
        folder: the model's folder.
        document: its config, as Triton's JSON.
        stub: the Python that the server's stub is built for; empty where that is not known.

    Raises:
        PlatformError: it cannot be read, is no environment, or is for another Python.
    """
    environment = named(document)
    if not environment:
        return
    path = Path(environment.replace(MODEL_FOLDER, str(folder)))
    try:
        found = _in_folder(path) if path.is_dir() else _in_archive(path)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise _unfit(document["name"], f"cannot be read: {error}") from None
    if not found:
        raise _unfit(document["name"], "holds no lib/python3.*")
    if stub and stub not in found:
        raise _another(document["name"], min(found), stub)


def _in_folder(folder: Path) -> set[str]:
    """The versions of Python that a folder has libraries for."""
    names = (f"{one.parent.name}/{one.name}/." for one in folder.glob("lib*/python3.*"))
    return {match[1] for name in names if (match := _LIBRARY.match(name))}


def _in_archive(path: Path) -> set[str]:
    """The first version that an archive has libraries for: those that follow are of the same."""
    with tarfile.open(path, "r|gz") as archive:
        for member in archive:
            match = _LIBRARY.match(member.name)
            if match:
                return {match[1]}
    return set()


def _unfit(model: str, found: str) -> PlatformError:
    return PlatformError(
        model,
        f"what {KEY} names {found}",
        expected="an archive made by `torch-py-backend pack`, or the folder of an environment",
        cure=f"Triton itself replaces {MODEL_FOLDER} by the model's folder.",
    )


def _another(model: str, found: str, runs: str) -> PlatformError:
    return PlatformError(
        model,
        f"{KEY} names an environment for Python {found}, and the server's stub runs Python {runs}",
        cure=f"Make the environment with Python {runs}, or put a stub for Python {found}, named"
        " triton_python_backend_stub, into the model's folder.",
    )
