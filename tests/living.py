"""Processes that may end while they are looked at, and their descendants."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import psutil


def ended(process: psutil.Process) -> bool:
    """Whether it is gone, or only waits for somebody to ask how it ended.

    psutil counts a process of the second kind as running; one whose parent has ended stays of it
    until the first process of its container asks, which may be never.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        # Of a process that is killed the first thread ends before others, which hold what is open.
        zombie = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
        return zombie or not process.is_running()
    return True


def left(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those of them that have not ended."""
    return [one for one in processes if not ended(one)]


def all_end(processes: Iterable[psutil.Process], seconds: float = 120.0) -> bool:
    """Whether each of them ends within this time: one that was killed takes a moment."""
    deadline = time.monotonic() + seconds
    while left(processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def pid_ends(pid: int) -> bool:
    """Return whether a process ends soon, or has ended."""
    try:
        return all_end([psutil.Process(pid)])
    except psutil.NoSuchProcess:
        return True


def descendants(pid: int) -> list[psutil.Process]:
    """The processes that live below one; none, where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return left(psutil.Process(pid).children(recursive=True))
    return []


def command(process: psutil.Process) -> str:
    """Its words, joined by blanks; empty where it has ended."""
    # A ZombieProcess is a NoSuchProcess.
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""
