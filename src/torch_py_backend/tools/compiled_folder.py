"""A folder of compiled files: those of each model under its name, and a manifest.

manifest.json has the facts of each model (`compiled_files`) and the SHA-256 of each of its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch_py_backend.config import tuned_settings
from torch_py_backend.errors import ArchiveError, InstallError, summarize
from torch_py_backend.processes import private_files
from torch_py_backend.tools import model_folder

BUNDLE, PACKAGE, TUNED = "bundle", "package", tuned_settings.FILE
_MANIFEST = "manifest.json"
_PATHS = {
    BUNDLE: re.compile(r"compile_cache/[^/]+\.bundle"),
    PACKAGE: re.compile(r"[0-9]+/[^/]+"),
    TUNED: re.compile(re.escape(TUNED)),
}
# The limits of files that are read at once.
_MAX_BYTES = {BUNDLE: 1 << 30, TUNED: 4 << 20, _MANIFEST: 4 << 20}


class File(NamedTuple):
    """A file that a manifest lists."""

    path: Path
    size: int
    sha256: str


class Model(NamedTuple):
    """The facts of a model that a manifest lists, and its files by kind."""

    facts: Mapping[str, Any]
    files: Mapping[str, File]


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


def write_manifest(folder: Path, facts: Mapping[str, object]) -> None:
    """Write the manifest of the models with these facts, whose files are in the folder."""
    models = {name: {"facts": facts[name], "files": digests(folder / name)} for name in facts}
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


def read(folder: Path) -> dict[str, Model]:
    """Return the models of a folder, whose files and manifest may contain anything.

    Raises:
        ArchiveError: the manifest is damaged, or the folder does not have exactly its files.
    """
    manifest = folder / _MANIFEST
    _size(manifest, _MANIFEST)
    try:
        listed = json.loads(manifest.read_bytes())["models"]
        models = {name: _model(folder / name, model) for name, model in listed.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _refusal(_MANIFEST, f"it cannot be read: {summarize(error)}") from None
    paths = {file.path for model in models.values() for file in model.files.values()} | {manifest}
    # Links to folders are not followed: no path through a link or '..' is among these.
    present = {path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    for path in sorted(paths ^ present):
        found = f"{_MANIFEST} does not list it" if path in present else "it is not in the folder"
        raise _refusal(os.path.relpath(path, folder), found)
    return models


def _model(folder: Path, listed: Mapping[str, Any]) -> Model:
    files: dict[str, File] = {}
    for name, digest in listed["files"].items():
        kind = next((kind for kind in _PATHS if _PATHS[kind].fullmatch(name)), "")
        if not kind or kind in files:
            raise ValueError(f"it lists '{folder.name}/{name}'")
        files[kind] = File(folder / name, _size(folder / name, kind), digest)
    return Model(dict(listed["facts"]), files)


def _size(path: Path, kind: str) -> int:
    """Return the size of a regular file.

    Raises:
        ArchiveError: it is another kind of file, or is too large.
    """
    try:
        status = path.lstat()
    except OSError as error:
        raise _refusal(path.name, f"it cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(path.name, "it is not a regular file")
    limit = _MAX_BYTES.get(kind, status.st_size)
    if status.st_size > limit:
        raise _refusal(path.name, f"it has {status.st_size} bytes", f"at most {limit}")
    return status.st_size


def copy(models: Mapping[str, Model], target: Path) -> None:
    """Copy the files of models to `target/<model>/<kind>`.

    Raises:
        ArchiveError: one differs from its SHA-256.
        InstallError: they do not fit on the disk.
        OSError: they cannot be copied.
    """
    needed = sum(file.size for model in models.values() for file in model.files.values())
    free = shutil.disk_usage(target).free
    if needed > free:
        raise InstallError(f"the files have {needed} bytes, and {target.parent} has {free} free.")
    for name, model in models.items():
        (target / name).mkdir()
        for kind, file in model.files.items():
            copied = target / name / kind
            with private_files.opened(file.path) as source, copied.open("xb") as output:
                shutil.copyfileobj(source, output)
            if _sha256(copied) != file.sha256:
                raise _refusal(file.path.name, f"its SHA-256 is not the one in {_MANIFEST}")


def _refusal(
    name: str, found: str, expected: str = "the folder that export-compiled wrote"
) -> ArchiveError:
    return ArchiveError(name[:200], found[:500], expected=expected, cure="Export or copy it again.")
