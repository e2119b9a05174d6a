"""Signals that end a command."""

from __future__ import annotations

import subprocess
import sys

_COMMAND = """
import signal
from torch_py_backend.cli import interruption

interruption.raise_at_signals()
try:
    signal.pthread_sigmask(signal.SIG_BLOCK, interruption.SIGNALS)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, interruption.SIGNALS)
except interruption.Stopped:
    signal.raise_signal(signal.SIGTERM)
    print("stopped", interruption.ignores_signals())
"""


def test_signals_that_arrive_together() -> None:
    """One ends the command, the others are ignored, and Python reports none of them."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped True\n", "")
