"""Notices that a mapped file of weights was written in place.

A file that is replaced by renaming keeps its pages for the processes that have mapped it. Writing
over it in place, as `cp` does, changes the weights during a request; truncating it ends a process
that reads them with SIGBUS.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

_PERIOD_S = 1.0


class MappedFiles:
    """The files of a model's weights, whose contents must stay as they were mapped.

    A file that cannot be opened, because it was removed meanwhile, is left out.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: list[tuple[str, int, tuple[int, int]]] = []
        for path in paths:
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._files.append((path.name, descriptor, _state(descriptor)))
        self._due = 0.0

    def changed(self) -> str:
        """Return the name of a file that was written; empty: none was, or the last look is new.

        The files are looked at once a second.
        """
        now = time.monotonic()
        if now < self._due:
            return ""
        self._due = now + _PERIOD_S
        return next(
            (name for name, descriptor, before in self._files if _state(descriptor) != before), ""
        )

    def close(self) -> None:
        """Close the files. May be called twice."""
        while self._files:
            os.close(self._files.pop()[1])


def _state(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_mtime_ns, status.st_size
