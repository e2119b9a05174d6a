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
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from torch_py_backend.errors import BackendError, LoadError, summarize
from torch_py_backend.processes import procfs

if TYPE_CHECKING:
    from typing_extensions import Self

_START = (
    # Replaces the current folder, whose files must not shadow other modules.
    "import sys; sys.path[0] = sys.argv[1];"
    " from torch_py_backend.processes import child_process; child_process.main()"
)

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
# The interval between checks of children that run together.
_POLL_S = 0.02


def run(
    model: str,
    task: str,
    arguments: Mapping[str, object],
    seconds: float,
    *,
    quiet: bool = False,
) -> Any:
    """Run a function in a child process, and return its result.

    Args:
        model: the model's name, for error messages.
        task: the function, as `module:function`.
        arguments: its keyword arguments; they and the result must be JSON.
        seconds: the time limit.
        quiet: whether the child's output is discarded.

    Raises:
        LoadError: the function raised, the child died, or it took too long.
    """
    deadline = time.monotonic() + seconds
    with _child(task, quiet=quiet) as child:
        child.send(arguments)
        child.close_messages()
        while time.monotonic() < deadline and child.process.poll() is None:
            time.sleep(_POLL_S)
        return child.result(model, seconds)


class Workers:
    """Child processes that each run a generator function and answer messages at the same time.

    The first message to a child has the keyword arguments of the function; its answer is what the
    generator yields first. Each further message is sent to the generator. Output is discarded.
    Used as a context manager, which kills the children at its end.
    """

    def __init__(self, model: str, task: str, count: int) -> None:
        """Start the children.

        Args:
            model: the model's name, for error messages.
            task: the generator function, as `module:function`.
            count: the number of children.
        """
        self._model = model
        with contextlib.ExitStack() as stack:
            self._children = [stack.enter_context(_child(task, quiet=True)) for _ in range(count)]
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether every child runs."""
        return all(child.process.poll() is None for child in self._children)

    def close(self) -> None:
        """Kill the children. May be called twice."""
        self._stack.close()

    def ask(self, messages: Sequence[object], seconds: float) -> list[Any]:
        """Send a message to each of the first children, and return their answers, all JSON.

        Raises:
            LoadError: a child failed or took too long. All are killed: a late answer would be
                taken for that of the next message.
        """
        deadline = time.monotonic() + seconds
        children = self._children[: len(messages)]
        for child, message in zip(children, messages, strict=True):
            child.result_file.unlink(missing_ok=True)
            child.send(message)
        while time.monotonic() < deadline:
            if all(child.result_file.is_file() for child in children):
                break
            if any(child.failed() for child in children):
                break
            time.sleep(_POLL_S)
        # A child that failed comes before those that took too long.
        for child in sorted(children, key=lambda child: not child.failed()):
            if child.failed() or not child.result_file.is_file():
                try:
                    child.result(self._model, seconds)
                finally:
                    self.close()
        return [json.loads(child.result_file.read_bytes())["result"] for child in children]


@dataclass(frozen=True, slots=True)
class _Child:
    """A process that runs a task, and the file that it writes its result to."""

    process: subprocess.Popen[bytes]
    result_file: Path

    @property
    def messages(self) -> IO[bytes]:
        return cast("IO[bytes]", self.process.stdin)

    def send(self, message: object) -> None:
        # The pipe is broken if the child died, or closed (a ValueError); `result` reports that.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.messages.write(json.dumps(message).encode() + b"\n")
            self.messages.flush()

    def close_messages(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.messages.close()

    def failed(self) -> bool:
        """Return whether the function raised, or the process ended without a result."""
        ended = self.process.poll() is not None
        if self.result_file.is_file():
            return "error" in json.loads(self.result_file.read_bytes())
        return ended

    def result(self, model: str, seconds: float) -> Any:
        """Return the result of the task.

        Raises:
            LoadError: the task failed, or the child ended without a result.
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


@contextlib.contextmanager
def _child(task: str, *, quiet: bool) -> Iterator[_Child]:
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
        child = _Child(process, result_file)
        try:
            yield child
        finally:
            _kill_tree(process)
            child.close_messages()


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
    """Run the task that the command line names, and write its results; called in the child."""
    _, _, task, path = sys.argv
    child = os.getpid()
    # A model's call may not return: the kernel kills this process when its parent dies.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    arguments = json.loads(sys.stdin.readline())
    module, _, function = task.partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(**arguments)
        if isinstance(result, Generator):
            answer = next(result)
            while os.getpid() == child:  # not a process that the model forked
                _write(path, {"result": answer})
                message = sys.stdin.readline()
                if not message:
                    break
                answer = result.send(json.loads(message))
            result = None
        outcome = {"result": result}
    except BackendError as error:
        text = error.traceback or traceback.format_exc()
        outcome = {"error": str(error), "traceback": text}
    except BaseException as error:
        with contextlib.suppress(ValueError, OSError):  # the model may have closed stderr
            traceback.print_exc()
        outcome = {"error": summarize(error), "traceback": traceback.format_exc()}
    if os.getpid() == child:  # not a process that the model forked
        _write(path, outcome)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()
    if os.getpid() == child:
        _kill(procfs.descendants(child))
    # Threads of the model must not delay the exit.
    os._exit(0)


def _write(path: str, outcome: Mapping[str, object]) -> None:
    temporary = Path(f"{path}.part")
    temporary.write_text(json.dumps(outcome), encoding="utf-8")
    temporary.rename(path)
