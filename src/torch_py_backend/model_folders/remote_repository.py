"""A model repository in an object store or on the Hugging Face hub, copied before it is served.

The store's own library reads the store, with the credentials that it finds. A file is fetched again
if what the store reports of it has changed since the last fetch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from torch_py_backend import files
from torch_py_backend.errors import ToolError, about, printable
from torch_py_backend.model_folders import artifact_files, creation
from torch_py_backend.processes import private_files

Report: TypeAlias = Callable[[str], None]
_HUB = "hf://"
_FETCHED = ".fetched.json"
_LONGEST = 300


def local(url: str, cache: Path | None, report: Report) -> Path:
    """Return the local folder of a model repository: the path itself, or what is fetched.

    If the store fails, the files that were fetched last are used.

    Args:
        url: a path, the address of a folder as fsspec reads it, or hf://organization/name@revision.
        cache: only this user may write to it; None: ~/.cache/torch-py-backend.
        report: called with what happens, a line each.

    Raises:
        ToolError: the store cannot be read and nothing was fetched before, or others may write to
            the cache.
        LoadError: what was fetched from the hub is neither a repository nor a model that runs.
    """
    if "://" not in url:
        return Path(url)
    if "@" in url and not url.startswith(_HUB):
        raise ToolError("the URL holds credentials; set the variables of the store's library.")
    cache = cache or Path("~/.cache/torch-py-backend").expanduser()
    if risk := private_files.create(cache):
        raise ToolError(f"the cache {cache} is not used: {risk}. Name another one with --cache.")
    name = url.rstrip("/").rpartition("/")[2].partition("@")[0]
    folder = cache / hashlib.sha256(url.encode()).hexdigest()[:16] / name
    folder.mkdir(parents=True, exist_ok=True)
    fetch = _fetch_model if url.startswith(_HUB) else _fetch_files
    with private_files.locked(folder.parent / "lock"):  # another server may fetch the same
        try:
            fetch(url, folder, report)
        except Exception as error:  # each store's library has exceptions of its own
            (reason, *_) = str(error).strip().splitlines() or [""]
            problem = (
                f"{url} cannot be read: {type(error).__name__}: {printable(reason)[:_LONGEST]}"
            )
            if isinstance(error, ImportError):
                problem += "; pip install 'torch-py-backend[stores]'"
            if not (folder / _FETCHED).exists():
                raise ToolError(f"{problem}.") from error
            report(f"{problem}. Serving the files that were fetched last.")
    if url.startswith(_HUB) and (folder / "config.json").is_file():
        return _with_model_folder(folder)
    return folder


def _fetch_model(url: str, folder: Path, report: Report) -> None:
    """Fetch a repository of the Hugging Face hub, whose library skips files that are the same."""
    import huggingface_hub  # noqa: PLC0415  only some users have it

    repository, _, revision = url.removeprefix(_HUB).partition("@")
    report(f"fetching {repository}")
    huggingface_hub.snapshot_download(repository, revision=revision or None, local_dir=folder)
    (folder / _FETCHED).write_text("{}")


def _fetch_files(url: str, folder: Path, report: Report) -> None:
    import fsspec  # noqa: PLC0415  only some users have it

    store, root = fsspec.url_to_fs(url)
    # What a store reports of a file, such as its size, etag and time, changes with the file.
    present = {
        path.removeprefix(root).lstrip("/"): str(facts)
        for path, facts in store.find(root, detail=True).items()
    }
    if not present:
        raise FileNotFoundError("it holds no files")
    fetched = folder / _FETCHED
    before = json.loads(fetched.read_bytes()) if fetched.exists() else {}
    changed = [name for name, facts in present.items() if before.get(name) != facts]
    if changed:
        report(f"fetching {len(changed)} files from {url}")
    # Complete files get their names last: a fetch that fails leaves the files of the last one.
    scratch = folder.with_name(".part").resolve()
    shutil.rmtree(scratch, ignore_errors=True)  # of a fetch that was killed
    scratch.mkdir()
    for name in changed:
        path = (scratch / name).resolve()
        if not path.is_relative_to(scratch) or path == scratch / _FETCHED:
            raise ValueError(f"the file {name!r} leads out of the folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(f"{root.rstrip('/')}/{name}", str(path))
    shutil.copytree(scratch, folder, copy_function=os.replace, dirs_exist_ok=True)
    shutil.rmtree(scratch)
    for name in before.keys() - present.keys():
        (folder / name).unlink(missing_ok=True)
    files.replace(fetched, json.dumps(present).encode())


def _with_model_folder(fetched: Path) -> Path:
    """Return a repository with a model folder of a save_pretrained folder, as `init` makes it."""
    repository = fetched.with_name("models")
    shutil.rmtree(repository, ignore_errors=True)
    with about(fetched.name):
        artifact = artifact_files.find(fetched, None, tensors=True)
        creation.create(repository / fetched.name, artifact, [], transfer=os.link)
    return repository
