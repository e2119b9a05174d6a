"""Instances whose tritonserver has ended without stopping them, as after kill -9.

Triton's stub ends by itself then, unless it is waiting for an answer of the server: a message to a
server that has ended, be it a metric, a log or the deletion of a request, holds a mutex for ever
that the stub needs to end.
"""

from __future__ import annotations

import os

_SERVER = os.getppid()


def is_orphaned() -> bool:
    """Return whether the server has ended, or this process was forked by the model."""
    return os.getppid() != _SERVER


def end_if_orphaned() -> None:
    """End this process at once if the server has ended. Not for code that forked processes run."""
    if is_orphaned():
        os._exit(os.EX_UNAVAILABLE)
