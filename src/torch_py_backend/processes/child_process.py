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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    package = str(Path(__file__).parents[2])
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torch-py-backend-"))
        children: list[_Child] = []
        for number, child_arguments in enumerate(arguments):
            arguments_file = Path(folder, f"{number}.arguments")
            arguments_file.write_text(json.dumps(child_arguments), encoding="utf-8")
            result_file = Path(folder, f"{number}.result")
            process = subprocess.Popen(  # noqa: S603  this Python, this package
                [sys.executable, "-c", _START, package, task, arguments_file, result_file],
                stdin=subprocess.DEVNULL,
                # The model's output must not mix with the command's output.
                stdout=subprocess.DEVNULL if quiet else 2,
                stderr=subprocess.DEVNULL if quiet else None,
                start_new_session=True,
            )
            stack.callback(_kill_tree, process)
            children.append(_Child(process, result_file))
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
        """Return the result of the task.

        Raises:
            LoadError: there is none.
        """
        code = self.process.poll()
        if not self.result_file.is_file():
            if code is None:
                reason = f"trying the model took longer than {seconds:g} seconds"
            elif code < 0:
                reason = f"trying the model ended with {procfs.signal_name(-code)}"
            else:
                reason = f"trying the model ended the process with exit code {code}"
            raise LoadError(model, reason, cure="The server's log may say more.")
        outcome = json.loads(self.result_file.read_bytes())
        if "error" in outcome:
            raise LoadError.from_message(outcome["error"], outcome["traceback"])
        return outcome["result"]


def _kill_tree(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and its descendants."""
    # If the child has ended, its process ID may belong to another process.
    descendants = procfs.descendants(child.pid) if child.poll() is None else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    _kill(descendants)
    child.wait()


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Run the task that the command line names, and write its result; called in the child."""
    _, _, task, arguments_file, result_file = sys.argv
    child = os.getpid()
    # A model's call may not return: the kernel kills this process when its parent dies.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    arguments = json.loads(Path(arguments_file).read_bytes())
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
        temporary = Path(f"{result_file}.part")
        temporary.write_text(json.dumps(outcome), encoding="utf-8")
        temporary.rename(result_file)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()
    if os.getpid() == child:
        _kill(procfs.descendants(child))
    # Threads of the model must not delay the exit.
    os._exit(0)
