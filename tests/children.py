"""Processes with which a test exchanges lines; all are killed at its end. What waits for others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from torch_py_backend.processes import instance_status

# A child imports no torch, unless its code does.
_PATHS = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]
_PATHS += filter(None, [os.environ.get("PYTHONPATH")])

Start: TypeAlias = "Callable[..., Child]"

# Its processes are copies of one that has imported torch and this package: none imports them again.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch_py_backend.engine.load", "torch_py_backend.engine.warmup"])


_Result = TypeVar("_Result")


def call(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Return what a function returns in a process of its own."""
    with ProcessPoolExecutor(1, FORKS) as pool:
        return pool.submit(function, *arguments).result()


def settle(folder: Path, **variables: str) -> None:
    """Use a folder for temporary files, and environment variables, in a process of `FORKS`."""
    os.environ.update(variables, TMPDIR=str(folder))
    tempfile.tempdir = None


def until(what: Callable[[], Any], told: Callable[[], str] = str, seconds: float = 240) -> Any:
    """Wait until it returns something, and return that; else the error has what is `told`."""
    deadline, pause = time.monotonic() + seconds, 0.01
    while not (value := what()):
        assert time.monotonic() < deadline, told()[-20000:]
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)
    return value


class Child:
    """A Python process that runs `code`, with `arguments` in sys.argv[1:]."""

    def __init__(self, folder: Path, code: str, *arguments: object, **variables: str) -> None:
        own = {"TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(_PATHS)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=os.environ | own | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> str:
        """Return the next line that it prints; empty if it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str = "") -> None:
        """Send a line for its input()."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ask(self, line: str = "") -> str:
        self.tell(line)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Close its input, and return its exit code."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait()


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[Start]:
    started: list[Child] = []

    def start(code: str, *arguments: object, **variables: str) -> Child:
        started.append(Child(folder, code, *arguments, **variables))
        return started[-1]

    try:
        yield start
    finally:
        for child in started:
            with contextlib.suppress(BrokenPipeError), child.process:
                child.kill()


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
) -> Iterator[Child]:
    """Run a process that publishes a status with the code `what`, and then runs `then`."""
    variables = {instance_status.VARIABLE: str(folder)} if mark else {}
    with starting(folder) as start:
        code = _PUBLISH.format(what=what, then=then)
        child = start(code, folder, model, limit, *words, **variables)
        assert child.hear() == "published"
        yield child
