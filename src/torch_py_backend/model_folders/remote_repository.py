"""A model repository in an object store or on the Hugging Face hub, copied before it is served.

The store's own library reads it, with the credentials that it finds, and only what has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from torch_py_backend import files
from torch_py_backend.config import pbtxt
from torch_py_backend.errors import ToolError, about, summarize
from torch_py_backend.model_folders import artifact_files, creation
from torch_py_backend.processes import private_files

_HUB = "hf://"


def local(
    url: str,
    cache: Path | None,
    report: Callable[[str], None],
) -> Path:
    """Return the local folder of a model repository: the path itself, or what is fetched.

    `url` is a path, a folder as fsspec reads it, or hf://organization/name@revision. If the store
    fails, the files that were fetched last are used, if there are any. `report` is called with
    lines on what happens. Others must not write to the cache; None: ~/.cache/torch-py-backend.
    """
    if "://" not in url:
        return Path(url)
    cache = cache or Path("~/.cache/torch-py-backend").expanduser()
    if risk := private_files.create(cache):
        raise ToolError(f"the cache {cache} is not used: {risk}. Name another one with --cache.")
    place = cache / hashlib.sha256(url.encode()).hexdigest()[:16]
    hub, _, revision = url.removeprefix(_HUB).partition("@")
    is_hub = url.startswith(_HUB)
    record = place / "fetched.json"
    folder = place / "models" / Path(hub).name / "1" if is_hub else place / "files"
    folder.mkdir(parents=True, exist_ok=True)
    with private_files.locked(place / "lock"):  # another server may fetch the same
        try:
            if is_hub:
                import huggingface_hub  # noqa: PLC0415  only some users have it

                report(f"fetching {hub}")
                huggingface_hub.snapshot_download(hub, revision=revision or None, local_dir=folder)
                # It removes no file, such as weights that shards have replaced.
                with contextlib.suppress(Exception):  # it is offline
                    named = huggingface_hub.list_repo_files(hub, revision=revision or None)
                    for path in folder.glob("[!.]*"):
                        if path.is_file() and path.name not in named:
                            path.unlink()
                record.write_text("{}")
            else:
                _fetch_files(url, folder, record, report)
        except Exception as error:  # each store's library has exceptions of its own
            problem = f"{url} cannot be read: {summarize(error)}"
            if not record.exists():
                raise ToolError(f"{problem}.") from error
            report(f"{problem}. Serving the files that were fetched last.")
        if is_hub and (folder / "config.json").is_file():
            model = folder.parent
            with about(model.name):
                _, needs = artifact_files.find_pretrained(folder, tensors=True)
                # Not the config of the last start: that of a folder without one.
                document = {**pbtxt.read(folder / model.name), **needs}
                creation.write_config(model, document, new=True)
            return model.parent
    return folder


def _fetch_files(
    url: str,
    folder: Path,
    record: Path,
    report: Callable[[str], None],
) -> None:
    import fsspec  # noqa: PLC0415  only some users have it

    store, root = fsspec.url_to_fs(url)
    # What a store reports of a file, such as its size, etag and time, changes with the file.
    present = {
        path.removeprefix(root).lstrip("/"): str(facts)
        for path, facts in store.find(root, detail=True).items()
        if not path.endswith("/")  # an object that stands for a folder
    }
    if not present:
        raise FileNotFoundError("it holds no files")
    before = json.loads(record.read_bytes()) if record.exists() else {}
    changed = [name for name, facts in present.items() if before.get(name) != facts]
    if changed:
        report(f"fetching {len(changed)} files from {url}")
        # Complete files get their names last: a fetch that fails leaves the files of the last one.
        scratch = record.resolve().with_name("part")
        shutil.rmtree(scratch, ignore_errors=True)  # of the last fetch
        paths = [(scratch / name).resolve() for name in changed]
        if not all(path.is_relative_to(scratch) for path in paths):
            raise ValueError("the name of a file leads out of the folder")
        for path in paths:  # not every store makes folders
            path.parent.mkdir(parents=True, exist_ok=True)
        store.get([f"{root.rstrip('/')}/{name}" for name in changed], [*map(str, paths)])
        shutil.copytree(scratch, folder, copy_function=os.replace, dirs_exist_ok=True)
    for name in before.keys() - present.keys():
        with contextlib.suppress(IsADirectoryError):  # as above, of an earlier version
            (folder / name).unlink(missing_ok=True)
    # With what loads have written there: a version without the model would be the latest one.
    for gone in _folders(before) - _folders(present):
        if ".." not in gone.parts:
            shutil.rmtree(folder / gone, ignore_errors=True)
    files.replace(record, json.dumps(present).encode())


def _folders(
    names: Iterable[str],
) -> set[Path]:
    return {parent for name in names for parent in Path(name).parents}
