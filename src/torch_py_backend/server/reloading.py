"""`serve --reload`: models whose files change are reloaded.

Triton loads the new model beside the one that serves, and replaces that when the new one is READY;
if the load fails, the old one serves on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeAlias

from torch_py_backend.config import repository
from torch_py_backend.errors import join_names
from torch_py_backend.server.client import Call, cause
from torch_py_backend.server.lifecycle import Event

# A change is complete when the files stay the same for this time.
_POLL_S = 1.0
# Written by loads of a model, and by Python.
_IGNORED = ("compile_cache", "__pycache__")

# Each file's path in the model's folder, the time of its last change in ns and its size.
Files: TypeAlias = "set[tuple[str, int, int]]"


class Reloader:
    """Loads the models of a repository whose files change, and those that are added to it.

    Args:
        path: the model repository.
        names: the models to watch; empty: all.
        load: begins to load a model within a time limit in seconds.
        on_event: called with each change, and with each load that ends.
        seconds: the time limit of a load.
    """

    def __init__(
        self,
        path: Path,
        names: Collection[str],
        load: Callable[[str, float], Call],
        on_event: Callable[[Event], None],
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._names = path, names
        self._load, self._on_event = load, on_event
        self._seconds, self._clock = seconds, clock
        # The loads in progress, and whether their models are new.
        self._loads: dict[str, tuple[Call, bool]] = {}
        self._loaded = self._polled = self._poll()
        self._due = clock() + _POLL_S

    def step(self) -> None:
        """Poll the files if that is due, begin loads, and report those that have ended."""
        now = self._clock()
        for name, (load, is_new) in list(self._loads.items()):
            if load.done():
                del self._loads[name]
                if error := load.failure():
                    self._on_event(Event("FAILED", name, cause(name, error)))
                elif not is_new:  # the supervisor reports new models
                    self._on_event(Event("READY", name, "reloaded"))
        if now < self._due:
            return
        self._due = now + _POLL_S
        before, self._polled = self._polled, self._poll()
        for name, files in self._polled.items():
            changed = files != self._loaded.get(name)
            if changed and files == before.get(name) and name not in self._loads:
                is_new = name not in self._loaded
                names = sorted({path for path, *_ in files ^ self._loaded.get(name, files)})
                self._on_event(Event("CHANGED", name, join_names(names) or "added"))
                self._loaded = {**self._loaded, name: files}
                self._loads[name] = self._load(name, self._seconds), is_new

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
    # A version folder may be a link, which os.walk follows only where it starts.
    links = [path for path in folder.glob("[0-9]*") if path.is_symlink()]
    walks = (os.walk(start) for start in (folder, *links))
    for parent, folders, names in itertools.chain.from_iterable(walks):
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
