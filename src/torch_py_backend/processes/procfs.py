"""What /proc reports about processes; psutil may be missing in the Python of a server."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_ZOMBIE = "Z"
_HINTS: dict[int, str] = {
    signal.SIGBUS: " (is /dev/shm full?)",
    signal.SIGKILL: " (a kill, or the kernel was out of memory)",
}


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if the process is gone."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # The process name, in brackets before the state, may hold any text.
        return text.rpartition(")")[2].split()
    return []


def start_time(pid: int) -> str | None:
    """Return when a process started, in clock ticks; None: it is gone, or a zombie.

    Together with its ID, this identifies a process: IDs are used again.
    """
    fields = _stat(pid)
    return None if fields[:1] in ([], [_ZOMBIE]) else fields[19]  # field 22, see proc(5)


def cause_of_death(pid: int) -> str:
    """Return how a process ended; its exit code is known until its parent reaps it."""
    fields = _stat(pid)
    code = int(fields[-1]) if fields[:1] == [_ZOMBIE] else 0
    if os.WIFSIGNALED(code):
        number = os.WTERMSIG(code)
        return f"was ended by {signal_name(number)}{_HINTS.get(number, '')}"
    return f"ended with exit code {os.WEXITSTATUS(code)}" if code else "died"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL; real-time signals have no names."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
