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

from torch_py_backend import files
from torch_py_backend.errors import ToolError, about, summarize
from torch_py_backend.model_folders import artifact_files, creation
from torch_py_backend.processes import private_files

_HUB = "hf://"
_RECORD = "fetched.json"


def local(url: str, cache: Path | None, report: Callable[[str], None]) -> Path:
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
    cache = cache or Path("~/.cache/torch-py-backend").expanduser()
    if risk := private_files.create(cache):
        raise ToolError(f"the cache {cache} is not used: {risk}. Name another one with --cache.")
    place = cache / hashlib.sha256(url.encode()).hexdigest()[:16]
    folder, models = place / "files", place / "models"
    folder.mkdir(parents=True, exist_ok=True)
    hub, _, revision = url.removeprefix(_HUB).partition("@")
    with private_files.locked(place / "lock"):  # another server may fetch the same
        try:
            if url.startswith(_HUB):
                import huggingface_hub  # noqa: PLC0415  only some users have it

                report(f"fetching {hub}")
                huggingface_hub.snapshot_download(hub, revision=revision or None, local_dir=folder)
                (place / _RECORD).write_text("{}")
            else:
                _fetch_files(url, place, folder, report)
        except Exception as error:  # each store's library has exceptions of its own
            problem = f"{url} cannot be read: {summarize(error)}"
            if not (place / _RECORD).exists():
                raise ToolError(f"{problem}.") from error
            report(f"{problem}. Serving the files that were fetched last.")
    if url.startswith(_HUB) and (folder / "config.json").is_file():
        name = Path(hub).name
        with about(name):
            found, needs = artifact_files.find(folder, None, tensors=True)
            creation.create(models / name, found, needs, transfer=os.link, force=True)
        return models
    return folder


def _fetch_files(
    url: str,
    place: Path,
    folder: Path,
    report: Callable[[str], None],
) -> None:
    import fsspec  # noqa: PLC0415  only some users have it

    store, root = fsspec.url_to_fs(url)
    # What a store reports of a file, such as its size, etag and time, changes with the file.
    present = {
        path.removeprefix(root).lstrip("/"): str(facts)
        for path, facts in store.find(root, detail=True).items()
    }
    if not present:
        raise FileNotFoundError("it holds no files")
    record = place / _RECORD
    before = json.loads(record.read_bytes()) if record.exists() else {}
    changed = [name for name, facts in present.items() if before.get(name) != facts]
    if changed:
        report(f"fetching {len(changed)} files from {url}")
    # Complete files get their names last: a fetch that fails leaves the files of the last one.
    scratch = place.resolve() / "part"
    shutil.rmtree(scratch, ignore_errors=True)  # of the last fetch
    scratch.mkdir()
    for name in changed:
        path = (scratch / name).resolve()
        if not path.is_relative_to(scratch):
            raise ValueError(f"the file {name!r} leads out of the folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(f"{root.rstrip('/')}/{name}", str(path))
    shutil.copytree(scratch, folder, copy_function=os.replace, dirs_exist_ok=True)
    for name in before.keys() - present.keys():
        (folder / name).unlink(missing_ok=True)
    files.replace(record, json.dumps(present).encode())
