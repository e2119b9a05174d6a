"""Functions run in child processes with a time limit, so that a crash or a hang becomes an error.

Triton does not notice that its stub died while it completed a config: the load, and at start-up
the whole server, would wait without end.
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
from typing import IO, Any, cast

from torch_py_backend.errors import BackendError, LoadError, summarize
from torch_py_backend.processes import procfs

_START = (
    # Replaces the current folder, whose files must not shadow other modules.
    "import sys; sys.path[0] = sys.argv[1];"
    " from torch_py_backend.processes import child_process; child_process.main()"
)

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
# The interval between checks of children that run together.
_POLL_S = 0.02


def run(model: str, task: str, arguments: Mapping[str, object], seconds: float) -> Any:
    """Run a function in a child process, and return its result.

    Args:
        model: the model's name, for error messages.
        task: the function, as `module:function`.
        arguments: its keyword arguments; they and the result must be JSON.
        seconds: the time limit.

    Raises:
        LoadError: the function raised, the child died, or it took too long.
    """
    (result,) = run_together(model, task, [arguments], seconds, quiet=False)
    return result


def run_together(
    model: str,
    task: str,
    arguments: Sequence[Mapping[str, object]],
    seconds: float,
    *,
    quiet: bool = True,
) -> list[Any]:
    """Run a function in several child processes at the same time, and return the results.

    There is one child for each set of arguments. With `quiet`, their output is discarded. See
    `run`.

    Raises:
        LoadError: a child failed; the others, which may wait for it, are killed.
    """
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_child(task, quiet=quiet)) for _ in arguments]
        for child, child_arguments in zip(children, arguments, strict=True):
            # The pipe is broken if the child died; `result` reports that.
            with (
                contextlib.suppress(BrokenPipeError),
                cast("IO[bytes]", child.process.stdin) as pipe,
            ):
                pipe.write(json.dumps(child_arguments).encode())
        while time.monotonic() < deadline:
            ended = [child for child in children if child.process.poll() is not None]
            if len(ended) == len(children) or any(child.failed() for child in ended):
                break
            time.sleep(_POLL_S)
        for child in children:
            if child.failed():  # by itself; others may have waited for it
                child.result(model, seconds)
        return [child.result(model, seconds) for child in children]


@dataclass(frozen=True, slots=True)
class _Child:
    """A process that runs a task, and the file that it writes its result to."""

    process: subprocess.Popen[bytes]
    result_file: Path

    def failed(self) -> bool:
        """Return whether the process has ended without a result."""
        if self.process.poll() is None:
            return False
        file = self.result_file
        return not file.is_file() or "error" in json.loads(file.read_bytes())

    def result(self, model: str, seconds: float) -> Any:
        """Return the result of the task; a child that still runs is killed.

        Raises:
            LoadError: there is no result.
        """
        code = _kill_tree(self.process)
        if not self.result_file.is_file():
            if code is None:
                reason = f"trying the model took longer than {seconds:g} seconds"
            elif code < 0:
                names = {number.value: number.name for number in signal.Signals}
                reason = f"trying the model ended with signal {names.get(-code, -code)}"
            else:
                reason = f"trying the model ended the process with exit code {code}"
            raise LoadError(model, reason, cure="The server's log may say more.")
        outcome = json.loads(self.result_file.read_bytes())
        if "error" in outcome:
            raise LoadError.from_message(outcome["error"], outcome["traceback"])
        return outcome["result"]


@contextlib.contextmanager
def _child(task: str, *, quiet: bool = False) -> Iterator[_Child]:
    with tempfile.TemporaryDirectory(prefix="torch-py-backend-") as folder:
        result_file = Path(folder) / "result.json"
        process = subprocess.Popen(  # noqa: S603  this Python, this package
            [sys.executable, "-c", _START, str(Path(__file__).parents[2]), task, str(result_file)],
            stdin=subprocess.PIPE,
            # The model's output must not mix with the command's output.
            stdout=subprocess.DEVNULL if quiet else 2,
            stderr=subprocess.DEVNULL if quiet else None,
            start_new_session=True,
        )
        try:
            yield _Child(process, result_file)
        finally:
            _kill_tree(process)


def _kill_tree(child: subprocess.Popen[bytes]) -> int | None:
    """Kill a child and its descendants; return its exit code, or None if it was still running."""
    code = child.poll()
    # If the child has ended, its process ID may belong to another process.
    descendants = procfs.descendants(child.pid) if code is None else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    _kill(descendants)
    child.wait()
    return code


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Run the task that the command line names, and write its result; called in the child."""
    _, _, task, path = sys.argv
    child = os.getpid()
    # A model's call may not return: the kernel kills this process when its parent dies.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    arguments = json.load(sys.stdin)
    module, _, function = task.partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(**arguments)
        outcome = {"result": result}
    except BackendError as error:
        text = error.traceback or traceback.format_exc()
        outcome = {"error": str(error), "traceback": text}
    except BaseException as error:
        with contextlib.suppress(ValueError, OSError):  # the model may have closed stderr
            traceback.print_exc()
        outcome = {"error": summarize(error), "traceback": traceback.format_exc()}
    if os.getpid() == child:  # not a process that the model forked
        temporary = Path(f"{path}.part")
        temporary.write_text(json.dumps(outcome), encoding="utf-8")
        temporary.rename(path)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()
    if os.getpid() == child:
        _kill(procfs.descendants(child))
    # Threads of the model must not delay the exit.
    os._exit(0)
