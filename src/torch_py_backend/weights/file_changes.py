"""Notices that a mapped file of weights was written in place.

A file that is replaced by renaming keeps its pages for the processes that have mapped it. Writing
over it in place, as `cp` does, changes the weights during a request; truncating it ends a process
that reads them with SIGBUS.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

_PERIOD_S = 1.0


class MappedFiles:
    """The files of a model's weights, whose contents must stay as they were mapped."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._states = {path: _state(path) for path in paths}
        self._due = 0.0

    def changed(self) -> str:
        """Return the name of a file that was written; empty: none was, or the last look is new.

        The files are looked at once a second.
        """
        now = time.monotonic()
        if now < self._due:
            return ""
        self._due = now + _PERIOD_S
        for path, before in self._states.items():
            state = _state(path)
            if state != before and state[:1] == before[:1]:
                return path.name
        return ""


def _state(path: Path) -> tuple[int, ...]:
    """Return the number of a file, which differs if it is replaced, its time and its size."""
    with contextlib.suppress(OSError):  # it was removed
        status = path.stat()
        return status.st_ino, status.st_mtime_ns, status.st_size
    return ()
