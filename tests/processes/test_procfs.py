"""What the kernel reports about processes."""

from __future__ import annotations

import os
import signal
import subprocess

from torch_py_backend.processes import procfs


def test_stopped() -> None:
    """A process is stopped from SIGSTOP to its end; one that is gone is not."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert not procfs.is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert procfs.is_stopped(process.pid)
        process.kill()
    assert not procfs.is_stopped(process.pid)
