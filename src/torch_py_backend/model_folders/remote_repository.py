"""A model repository at a URL, fetched before `serve` serves it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from torch_py_backend.errors import LoadError, ToolError
from torch_py_backend.model_folders import artifact_files, creation
from torch_py_backend.server import fetch


def local(url: str, cache: Path | None, report: Callable[[str], None]) -> Path:
    """Return the local folder of a model repository: the path itself, or what is fetched.

    What happens is passed to `report`, a line each.

    Raises:
        ToolError: the store fails, or the cache cannot be used.
    """
    if "://" not in url:
        return Path(url)
    folder = fetch.fetch(url, cache or _default_cache(), report)
    if url.startswith("hf://") and (folder / "config.json").is_file():
        return _with_model_folder(folder, url)
    return folder


def _default_cache() -> Path:
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise ToolError(f"{error}; name a folder for the cache with --cache.") from None
    return home / "torch-py-backend"


def _with_model_folder(files: Path, url: str) -> Path:
    """Return a repository with a model folder of a save_pretrained folder, as `init` makes it."""
    repository = files.with_name("models")
    shutil.rmtree(repository, ignore_errors=True)
    artifact = artifact_files.find(files, None)
    try:
        creation.create(repository / files.name, artifact, [], transfer=os.link)
    except LoadError as error:
        raise ToolError(
            f"{url} is no model repository, and no model that is served as it is: {error} Make a"
            " model folder of it with `torch-py-backend init`."
        ) from error
    return repository
