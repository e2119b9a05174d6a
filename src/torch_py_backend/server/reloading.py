"""`serve --reload`: models whose files change are reloaded.

Triton loads the new model beside the one that serves, and replaces that when the new one is READY;
if the load fails, the old one serves on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeAlias

from torch_py_backend.config import repository
from torch_py_backend.errors import join_names

# A change is complete when the files stay the same for this time.
_POLL_S = 1.0
# Written by loads of a model, and by Python.
_IGNORED = ("compile_cache", "__pycache__")

# Each file's path in the model's folder, the time of its last change in ns and its size.
Files: TypeAlias = "set[tuple[str, int, int]]"


class Reloader:
    """Reloads the models of a repository whose files change, and loads those that are added to it.

    Args:
        path: the model repository.
        names: the models to watch; empty: all.
        reload: begins to load a model, with the names of the files that changed; False: it cannot
            be loaded now, and is tried again.
    """

    def __init__(
        self,
        path: Path,
        names: Collection[str],
        reload: Callable[[str, str], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._names = names
        self._reload = reload
        self._clock = clock
        self._polled = self._poll()
        self._loaded = dict(self._polled)
        self._due = clock() + _POLL_S

    def step(self) -> None:
        """Poll the files if that is due, and begin loads."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + _POLL_S
        before, self._polled = self._polled, self._poll()
        for name, files in self._polled.items():
            loaded = self._loaded.get(name)
            if files != loaded and files == before.get(name):
                names = sorted({path for path, *_ in files ^ (loaded or files)})
                if self._reload(name, join_names(names) or "added"):
                    self._loaded[name] = files

    def _poll(self) -> Mapping[str, Files]:
        try:
            return {
                folder.name: _files(folder)
                for folder in repository.models(self._path)
                if not self._names or folder.name in self._names
            }
        except OSError:  # the repository is being replaced
            return {}


def _files(folder: Path) -> Files:
    files = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not _is_ignored(name)]
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(OSError):  # it is being replaced
                if not _is_ignored(name):
                    status = path.stat()
                    files.add((str(path.relative_to(folder)), status.st_mtime_ns, status.st_size))
    return files


def _is_ignored(name: str) -> bool:
    return name in _IGNORED or name.startswith(".") or name.endswith("~")
