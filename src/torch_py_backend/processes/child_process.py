"""Risky work in a child process with a time limit: a crash or a hang there is an error here.

Triton never notices that its stub died while it completed a config: the load, and at start-up the
whole server, would wait for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import locale
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_py_backend.errors import BackendError, LoadError, brief

_START = (
    # In the place of the current folder, whose files must shadow nothing.
    "import sys; sys.path[0] = sys.argv[1];"
    " from torch_py_backend.processes import child_process; child_process.answer()"
)

# Of <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
# How often children that run together are looked at.
_POLL_S = 0.02


def run(model: str, task: str, arguments: Mapping[str, Any], seconds: float) -> Any:
    """What `module:function` of this package returns for JSON arguments, run in a child.

    Raises:
        LoadError: the function raised, the child died, or the time is over.
    """
    with _child(task) as child:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.communicate(json.dumps(arguments).encode(), timeout=seconds)
        return child.result(model, seconds)


def run_together(
    model: str, task: str, arguments: Sequence[Mapping[str, Any]], seconds: float
) -> list[Any]:
    """As `run`, in as many children at the same time as there are arguments, without their output.

    Raises:
        LoadError: one of them failed; the others, which may wait for it, are ended.
    """
    until = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_child(task, quiet=True)) for _ in arguments]
        for child, given in zip(children, arguments, strict=True):
            child.give(given)
        while time.monotonic() < until:
            ended = [child for child in children if child.process.poll() is not None]
            if len(ended) == len(children) or any(child.failed() for child in ended):
                break
            time.sleep(_POLL_S)
        # First what failed by itself, then who waited for it.
        for child in sorted(children, key=lambda one: not one.failed()):
            child.result(model, seconds)
        return [child.result(model, seconds) for child in children]


@dataclass(frozen=True, slots=True)
class _Child:
    """A process that runs a task, and the file in which it leaves its answer."""

    process: subprocess.Popen[bytes]
    answer: Path

    def give(self, arguments: Mapping[str, Any]) -> None:
        """Hand over the arguments, and do not wait."""
        stdin = self.process.stdin
        # A child that died does not read: `result` says how it died.
        with contextlib.suppress(BrokenPipeError):
            if stdin is not None:
                with stdin:
                    stdin.write(json.dumps(arguments).encode())

    def failed(self) -> bool:
        """Whether it has ended without a result."""
        if self.process.poll() is None:
            return False
        return not self.answer.is_file() or "error" in json.loads(self.answer.read_bytes())

    def result(self, model: str, seconds: float) -> Any:
        """What the task returned; a child that still runs is ended."""
        code = _end(self.process)
        if not self.answer.is_file():
            raise LoadError(model, _died(code, seconds), cure="The server's log may say more.")
        told = json.loads(self.answer.read_bytes())
        if "error" in told:
            raise LoadError.told(told["error"], told["traceback"])
        return told["result"]


@contextlib.contextmanager
def _child(task: str, *, quiet: bool = False) -> Iterator[_Child]:
    with tempfile.TemporaryDirectory(prefix="torch-py-backend-") as folder:
        answer = Path(folder) / "answer.json"
        process = subprocess.Popen(  # noqa: S603  this Python, this package
            [sys.executable, "-c", _START, str(Path(__file__).parents[2]), task, str(answer)],
            stdin=subprocess.PIPE,
            # What a model prints must not mix with what a command prints.
            stdout=subprocess.DEVNULL if quiet else 2,
            stderr=subprocess.DEVNULL if quiet else None,
            start_new_session=True,
        )
        try:
            yield _Child(process, answer)
        finally:
            _end(process)


def _end(child: subprocess.Popen[bytes]) -> int | None:
    """The child's exit code; None: it still ran, and was ended with all that it started."""
    code = child.poll()
    # Of one that has ended, the number may be another's by now.
    started = _started_by(child.pid) if code is None else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    _kill(started)
    child.wait()
    return code


def _started_by(ancestor: int) -> list[int]:
    """Also those that have left the process group; asked while their parents live.

    By hand: the Python of a server that the backend is installed for need not have psutil.
    """
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            _, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, waiting = [], [ancestor]
    while waiting:
        started = children.get(waiting.pop(), [])
        found += started
        waiting += started
    return found


def _kill(processes: Iterable[int]) -> None:
    for one in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)


def _died(code: int | None, seconds: float) -> str:
    if code is None:
        return f"trying the model took longer than {seconds:g} seconds"
    if code < 0:
        names = {one.value: one.name for one in signal.Signals}
        return f"trying the model ended with signal {names.get(-code, -code)}"
    return f"trying the model ended the process with exit code {code}"


def end_with_parent() -> None:
    """Be killed when the process dies that waits for us: what a model does may take for ever."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def answer() -> None:
    """The child: run the task that the arguments name, and write down what it returned."""
    _, _, task, path = sys.argv
    child = os.getpid()
    end_with_parent()
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    arguments = json.load(sys.stdin)
    module, _, function = task.partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(**arguments)
        told = {"result": result}
    except BackendError as error:
        text = error.traceback or traceback.format_exc()
        told = {"error": str(error), "traceback": text}
    except BaseException as error:
        with contextlib.suppress(ValueError, OSError):  # the model may have closed it
            traceback.print_exc()
        told = {"error": brief(error), "traceback": traceback.format_exc()}
    if os.getpid() == child:  # and not a fork of the model's
        temporary = Path(f"{path}.part")
        temporary.write_text(json.dumps(told), encoding="utf-8")
        temporary.rename(path)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()
    if os.getpid() == child:
        _kill(_started_by(child))
    # Threads that a model has started do not keep the answer waiting.
    os._exit(0)
