"""Risky work in a child process with a time limit: a crash or a hang there is an error here.

Triton never notices that its stub died while it completed a config: the load, and at start-up the
whole server, would wait for ever.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import locale
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch_py_backend.errors import BackendError, LoadError, brief

_START = (
    # In the place of the current folder, whose files must shadow nothing.
    "import sys; sys.path[0] = sys.argv[1];"
    " from torch_py_backend import isolation; isolation.answer()"
)


def run(model: str, task: str, arguments: Mapping[str, Any], seconds: float) -> Any:
    """What `module:function` of this package returns for JSON arguments, run in a child.

    Raises:
        LoadError: the function raised, the child died, or the time is over.
    """
    with tempfile.TemporaryDirectory(prefix="torch-py-backend-") as folder:
        answer = Path(folder) / "answer.json"
        child = subprocess.Popen(  # noqa: S603  this Python, this package
            [sys.executable, "-c", _START, str(Path(__file__).parents[1]), task, str(answer)],
            stdin=subprocess.PIPE,
            stdout=2,  # what a model prints must not mix with what a command prints
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(json.dumps(arguments).encode(), timeout=seconds)
        finally:
            code = _end(child)
        if not answer.is_file():
            raise LoadError(model, _died(code, seconds), cure="The server's log may say more.")
        told = json.loads(answer.read_bytes())
    if "error" in told:
        raise LoadError.told(told["error"])
    return told["result"]


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


def answer() -> None:
    """The child: run the task that the arguments name, and write down what it returned."""
    _, _, task, path = sys.argv
    child = os.getpid()
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    arguments = json.load(sys.stdin)
    module, _, function = task.partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(**arguments)
        told = {"result": result}
    except BackendError as error:
        told = {"error": str(error)}
    except BaseException as error:
        with contextlib.suppress(ValueError, OSError):  # the model may have closed it
            traceback.print_exc()
        told = {"error": brief(error)}
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
