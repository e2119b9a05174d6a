"""Functions run in child processes with a time limit, so that a crash or a hang becomes an error.

Triton does not notice that its stub died while it completed a config: the load, and at start-up
the whole server, would wait without end.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
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
_CURE = "The server's log may say more."
_SLOW = f"If config.pbtxt lacks inputs or outputs, write them there. {_CURE}"


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
    with Workers(model, task, 1, quiet=quiet) as workers:
        return workers.ask([arguments], seconds)[0]


class Workers:
    """Child processes that run a function and answer messages at the same time.

    The first message to a child has the keyword arguments of the function. Its answer is the result
    or, of a generator, what that yields first; each further message is sent to the generator. Used
    as a context manager, which kills the children at its end.
    """

    def __init__(self, model: str, task: str, count: int, *, quiet: bool = True) -> None:
        self._model = model
        with contextlib.ExitStack() as stack:
            self._children = [stack.enter_context(_child(task, quiet=quiet)) for _ in range(count)]
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
            child.send(message)
        try:
            while True:
                # The error of a child comes before those that wait for it.
                outcomes = [child.outcome(self._model) for child in children]
                if None not in outcomes:
                    return [outcome["result"] for outcome in outcomes if outcome is not None]
                if time.monotonic() > deadline:
                    reason = f"trying the model took longer than {seconds:g} seconds"
                    raise LoadError(self._model, reason, cure=_SLOW)
                time.sleep(_POLL_S)
        except LoadError:
            self.close()
            raise


@dataclass(frozen=True, slots=True)
class _Child:
    """A process that runs a task, and the file that it writes its answer to."""

    process: subprocess.Popen[bytes]
    answer: Path

    def send(self, message: object) -> None:
        self.answer.unlink(missing_ok=True)
        # The pipe is broken if the child died, or closed (a ValueError); `outcome` reports that.
        with contextlib.suppress(BrokenPipeError, ValueError):
            stdin = cast("IO[bytes]", self.process.stdin)
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()

    def outcome(self, model: str) -> dict[str, Any] | None:
        """Return the answer to the last message, or None while there is none.

        Raises:
            LoadError: the task failed, or the child ended without an answer.
        """
        code = self.process.poll()  # before the answer, which may be the last act of the child
        if self.answer.is_file():
            outcome: dict[str, Any] = json.loads(self.answer.read_bytes())
            if "error" in outcome:
                raise LoadError.from_message(outcome["error"], outcome["traceback"])
            return outcome
        if code is None:
            return None
        how = (
            f"with {procfs.signal_name(-code)}"
            if code < 0
            else f"the process with exit code {code}"
        )
        raise LoadError(model, f"trying the model ended {how}", cure=_CURE)


@contextlib.contextmanager
def _child(task: str, *, quiet: bool) -> Iterator[_Child]:
    with tempfile.TemporaryDirectory(prefix="torch-py-backend-") as folder:
        answer = Path(folder) / "answer.json"
        process = subprocess.Popen(  # noqa: S603  this Python, this package
            [sys.executable, "-c", _START, str(Path(__file__).parents[2]), task, str(answer)],
            stdin=subprocess.PIPE,
            # The model's output must not mix with the command's output.
            stdout=subprocess.DEVNULL if quiet else 2,
            stderr=subprocess.DEVNULL if quiet else None,
            start_new_session=True,
        )
        try:
            yield _Child(process, answer)
        finally:
            # If the child has ended, its process ID may belong to another process.
            descendants = procfs.descendants(process.pid) if process.poll() is None else []
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _kill(descendants)
            process.communicate()  # closes the pipe


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


# --- in the child ----------------------------------------------------------------------------


def main() -> None:
    """Run the task that the command line names, and write its answers."""
    _, _, task, path = sys.argv
    child = os.getpid()
    # A model's call may not return: the kernel kills this process when its parent dies.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    use_utf8()
    # The model must not read the messages: its standard input is empty.
    messages = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    module, _, function = task.partition(":")
    try:
        arguments = json.loads(messages.readline())
        result = getattr(importlib.import_module(module), function)(**arguments)
        if isinstance(result, Generator):
            answer = next(result)
            while os.getpid() == child:  # not a process that the model forked
                _write(path, {"result": answer})
                message = messages.readline()
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
    # First: the parent kills this process when it has read the answer.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()
    if os.getpid() == child:  # not a process that the model forked
        _write(path, outcome)
        _kill(procfs.descendants(child))
    # Threads of the model must not delay the exit.
    os._exit(0)


def use_utf8() -> None:
    """Make UTF-8 the encoding of this process's text files and of what it prints.

    Triton's stub runs in the C locale. torch.compile reads its templates, and models print, text
    outside ASCII.
    """
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _write(path: str, outcome: Mapping[str, object]) -> None:
    temporary = Path(f"{path}.part")
    temporary.write_text(json.dumps(outcome), encoding="utf-8")
    temporary.rename(path)
