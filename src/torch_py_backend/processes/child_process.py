"""Functions run in child processes with a time limit, so that a crash or a hang becomes an error.

Triton does not notice that its stub died while it completed a config: the load, and at start-up
the whole server, would wait without end.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import locale
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_py_backend.errors import BackendError, LoadError, summarize
from torch_py_backend.processes import procfs

_START = (
    # Replaces the current folder, whose files must not shadow other modules.
    "import sys; sys.path[0] = sys.argv[1];"
    " from torch_py_backend.processes import child_process; child_process.main()"
)
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_CURE = "The server's log may say more."


def run(
    task: str,
    arguments: Mapping[str, object],
    seconds: float,
    *,
    quiet: bool = False,
) -> Any:
    """Run a function, `module:function`, in a child process, and return its result.

    Its keyword arguments and result are JSON; its output is discarded if `quiet`. Processes that it
    starts end with it, unless in own sessions. LoadError if it raises, dies or exceeds `seconds`.
    """
    output = subprocess.DEVNULL if quiet else 2  # not the command's own output
    # Holds the child's arguments, then its answer. It has no name, so that nothing is left of it.
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(arguments).encode())
        file.seek(0)
        process = subprocess.Popen(  # noqa: S603  this Python, this package
            [sys.executable, "-c", _START, str(Path(__file__).parents[2]), task],
            stdin=file,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise LoadError(
                f"trying the model took longer than {seconds:g} seconds",
                cure=f"If config.pbtxt lacks inputs or outputs, write them there. {_CURE}",
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(0)
        answer, code = file.read(), process.returncode
    if code or not answer:
        how = procfs.signal_name(-code) if code < 0 else f"exit code {code}"
        raise LoadError(f"trying the model ended the process with {how}", cure=_CURE)
    outcome = json.loads(answer)
    if "error" in outcome:
        error = LoadError(outcome["error"])
        error.traceback = outcome["traceback"]
        raise error
    return outcome["result"]


def main() -> None:
    """In the child: run the task that the command line names, and write its answer."""
    child = os.getpid()
    # A model's call may not return: the kernel kills this process when its parent dies.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    use_utf8()
    file = os.fdopen(os.dup(0), "r+b")  # the model may close the stream
    arguments = json.load(file)
    file.seek(0)
    file.truncate()
    try:
        answer = {"result": pkgutil.resolve_name(sys.argv[2])(**arguments)}
    except BackendError as error:
        answer = {"error": str(error), "traceback": error.traceback or traceback.format_exc()}
    except BaseException as error:
        answer = {"error": summarize(error), "traceback": traceback.format_exc()}
        with contextlib.suppress(Exception):  # the model may have closed the stream
            traceback.print_exc()
    if os.getpid() == child:  # not a process that the model forked
        file.write(json.dumps(answer).encode())
        file.flush()
    os._exit(0)  # threads of the model must not delay the exit


def use_utf8() -> None:
    """Make UTF-8 the encoding of this process's text files and of what it prints.

    Triton's stub runs in the C locale; templates of torch.compile have text outside ASCII.
    """
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
