"""Copies a model repository from an object store or the Hugging Face hub into a folder.

The store's own library reads the store, with the credentials that it finds. A file is fetched again
if its size, etag or time of change in the store differs from that of the last fetch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_py_backend import files
from torch_py_backend.errors import ToolError, printable
from torch_py_backend.processes import private_files

_FETCHED = ".fetched.json"
# What stores report of a file; each store has some of them.
_FACTS = ("size", "ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "created")
_INSTALL = "pip install 'torch-py-backend[stores]'"
_LONGEST = 300


def fetch(url: str, cache: Path, report: Callable[[str], None]) -> Path:
    """Return the folder with the files of a URL such as s3://bucket/folder or hf://org/model.

    If the store fails, the files that were fetched last are used.

    Args:
        url: the address of a folder, as fsspec reads it, or hf://organization/model@revision.
        cache: the folder for what is fetched; only this user may write to it.
        report: called with what happens, a line each.

    Raises:
        ToolError: the store cannot be read and nothing was fetched before, or the cache cannot be
            used.
    """
    if "@" in url and not url.startswith("hf://"):
        raise ToolError("the URL holds credentials; set the variables of the store's library.")
    name = url.rstrip("/").rpartition("/")[2].partition("@")[0]
    folder = cache / hashlib.sha256(url.encode()).hexdigest()[:16] / name
    try:
        risk = private_files.create(cache)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(f"the cache {cache} cannot be used: {error}.") from error
    if risk:
        raise ToolError(f"the cache {cache} is not used: {risk}. Name another one with --cache.")
    with private_files.locked(folder.parent / "lock"):  # another server may fetch the same
        try:
            if url.startswith("hf://"):
                _fetch_model(url.removeprefix("hf://"), folder, report)
            else:
                _fetch_files(url, folder, report)
        except Exception as error:  # each store's library has exceptions of its own
            problem = f"{url} cannot be read: {_reason(error)}."
            if not (folder / _FETCHED).exists():
                raise ToolError(problem) from error
            report(f"{problem} Serving the files that were fetched last.")
    return folder


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    hint = f" {_INSTALL}" if isinstance(error, ImportError) else ""
    text = f"{type(error).__name__}: {printable(lines[0])[:_LONGEST]}".rstrip(".: ")
    return f"{text}.{hint}" if hint else text


def _fetch_model(name: str, folder: Path, report: Callable[[str], None]) -> None:
    """Fetch a repository of the Hugging Face hub, unless this commit was fetched."""
    import huggingface_hub  # noqa: PLC0415  only some users have it

    repository, _, revision = name.partition("@")
    commit = huggingface_hub.HfApi().model_info(repository, revision=revision or None).sha
    if _fetched(folder) == {"commit": commit}:
        return
    report(f"fetching {repository} at {commit}")
    huggingface_hub.snapshot_download(repository, revision=commit, local_dir=folder)
    files.replace(folder / _FETCHED, json.dumps({"commit": commit}).encode())


def _fetch_files(url: str, folder: Path, report: Callable[[str], None]) -> None:
    import fsspec  # noqa: PLC0415  only some users have it

    store, root = fsspec.url_to_fs(url)
    listing: dict[str, dict[str, Any]] = store.find(root, detail=True)
    present = {
        path.removeprefix(root).lstrip("/"): [
            str(facts[key]) for key in _FACTS if facts.get(key) is not None
        ]
        for path, facts in listing.items()
    }
    if not present:
        raise FileNotFoundError("it holds no files")
    for name in present:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()) or path == (folder / _FETCHED).resolve():
            raise ValueError(f"the file {name!r} leads out of the folder")
    before = _fetched(folder)
    # Complete files get their names last: a fetch that fails leaves the files of the last one.
    parts = {
        name: (folder / name).with_name(f".{Path(name).name}.part")
        for name, facts in present.items()
        if before.get(name) != facts
    }
    if parts:
        report(f"fetching {len(parts)} files from {url}")
    for name, part in parts.items():
        part.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(f"{root.rstrip('/')}/{name}", str(part))
    for name, part in parts.items():
        part.replace(folder / name)
    for name in before.keys() - present.keys():
        (folder / name).unlink(missing_ok=True)
    files.replace(folder / _FETCHED, json.dumps(present).encode())


def _fetched(folder: Path) -> dict[str, Any]:
    """Return the facts about the files of the last complete fetch; empty: there was none."""
    path = folder / _FETCHED
    return dict(json.loads(path.read_bytes())) if path.exists() else {}
