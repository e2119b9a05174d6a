"""A folder of compiled files: those of each model under its name, and a manifest.

manifest.json has the SHA-256 of each file of a model, and of those beside a package in the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from torch_py_backend.errors import ArchiveError, InstallError, summarize
from torch_py_backend.tools import model_folder

_MANIFEST = "manifest.json"


@contextlib.contextmanager
def created(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `folder` at the end and is removed after an error.

    Raises:
        InstallError: the folder exists or cannot be written.
    """
    if os.path.lexists(folder):
        raise InstallError(f"{folder} exists already; name another folder.")
    with model_folder.scratch_folder(folder.parent, f"cannot write {folder}") as scratch:
        content = scratch / folder.name
        content.mkdir()
        yield content
        content.rename(folder)


def write_manifest(folder: Path, beside: Mapping[str, object]) -> None:
    """Write the manifest of the models whose files are in the folder.

    `beside` has the SHA-256 of the files beside the package of each model.
    """
    models = {name: {"files": digests(folder / name), "beside": beside[name]} for name in beside}
    (folder / _MANIFEST).write_text(json.dumps({"models": models}, indent=2), encoding="utf-8")


def digests(folder: Path, ignored: Collection[Path] = ()) -> dict[str, str]:
    """Return the SHA-256 of each file in a folder, except for ignored files and __pycache__."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path not in ignored)
    return {
        path.relative_to(folder).as_posix(): _sha256(path)
        for path in files
        if "__pycache__" not in path.parts
    }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def read(folder: Path) -> dict[str, dict[str, str]]:
    """Return `beside` of each model of a folder, whose files and manifest may contain anything.

    Raises:
        ArchiveError: the manifest is damaged, or the folder does not have exactly its files.
    """
    manifest = folder / _MANIFEST
    try:
        models = json.loads(manifest.read_bytes())["models"]
        beside = {name: dict(model["beside"]) for name, model in models.items()}
        listed = {
            folder / name / file: digest
            for name, model in models.items()
            for file, digest in model["files"].items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _refusal(_MANIFEST, f"it cannot be read: {summarize(error)}") from None
    # Links to folders are not followed: no path through a link or '..' is among these.
    paths = {path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    for path in sorted(paths | listed.keys()):
        name = os.path.relpath(path, folder)
        if path not in paths:
            raise _refusal(name, "it is not in the folder")
        if path not in listed and path != manifest:
            raise _refusal(name, f"{_MANIFEST} does not list it")
        if path.is_symlink() or not path.is_file():
            raise _refusal(name, "it is not a regular file")
        if path in listed and _sha256(path) != listed[path]:
            raise _refusal(name, f"its SHA-256 is not the one in {_MANIFEST}")
    return beside


def _refusal(name: str, found: str) -> ArchiveError:
    return ArchiveError(
        name[:200],
        found,
        expected="the folder that export-compiled wrote",
        cure="Export or copy it again.",
    )
