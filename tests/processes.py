"""Small processes that publish a status, in the role of instances."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from children import starting

from torch_py_backend.processes import instance_status

_PUBLISH = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from torch_py_backend.processes import instance_status
from torch_py_backend.processes.instance_status import Identity, InstanceState, InstanceStatus
folder, model, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) or None
os.environ[instance_status.VARIABLE] = str(folder)  # /proc shows what it was at the start
status = InstanceStatus(identity=Identity(os.getpid(), model, model + "_0_0", limit))
{what}
print("published", flush=True)
{then}
time.sleep(1000)
"""


@contextlib.contextmanager
def instance(
    folder: Path,
    what: str,
    *words: str,
    then: str = "",
    model: str = "m",
    limit: int = 0,
    mark: bool = True,
) -> Iterator[subprocess.Popen[str]]:
    """Run a process that publishes a status with the code `what`, and then runs `then`."""
    variables = {instance_status.VARIABLE: str(folder)} if mark else {}
    with starting(folder) as start:
        code = _PUBLISH.format(what=what, then=then)
        child = start(code, folder, model, limit, *words, **variables)
        assert child.hear() == "published"
        yield child.process


def ended(process: subprocess.Popen[str]) -> None:
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
