"""Small processes that tell their vitals, in the role of instances."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from torch_py_backend.processes import orphan_cleanup

_TELL = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from torch_py_backend.processes import instance_status
from torch_py_backend.processes.instance_status import Identity, State, Told
folder, model, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) or None
told = Told(folder, Identity(os.getpid(), model, "1", model + "_0_0", limit), State.LOADING)
{what}
print("told", flush=True)
{then}
time.sleep(1000)
"""


@contextlib.contextmanager
def instance(
    folder: Path, what: str, *, then: str = "", model: str = "m", limit: int = 0, mark: bool = True
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has told `what`, and then does `then`."""
    environment = os.environ | ({orphan_cleanup.VARIABLE: str(folder)} if mark else {})
    process = subprocess.Popen(
        [sys.executable, "-c", _TELL.format(what=what, then=then), folder, model, str(limit)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"told\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has ended, and leave its exit code to whoever asks the kernel."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
