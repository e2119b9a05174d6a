"""Processes that may end while a test looks at them, and their descendants."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable
from typing import Any

import psutil
from children import until


def ended(process: psutil.Process) -> bool:
    """Return whether a process is gone or a zombie, which psutil counts as running.

    An orphaned zombie stays until the first process of its container reaps it, perhaps for ever.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        # The main thread of a killed process ends before others, which keep its files open.
        zombie = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
        return zombie or not process.is_running()
    return True


def left(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if not ended(process)]


def wait(processes: Iterable[psutil.Process]) -> None:
    until(lambda: not left(processes))


def descendants(pid: int) -> list[psutil.Process]:
    """Return the live descendants of a process; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return left(psutil.Process(pid).children(recursive=True))
    return []


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process with its descendants, unless it has ended."""
    family = descendants(process.pid) if process.poll() is None else []
    process.kill()
    for descendant in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
    process.wait()


def command(process: psutil.Process) -> str:
    """Return the command line, joined by blanks; empty if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):  # or a ZombieProcess
        return " ".join(process.cmdline())
    return ""
