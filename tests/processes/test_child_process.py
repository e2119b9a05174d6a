"""Functions in child processes: each has a result, or one error of one line."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import living
import psutil
import pytest

from torch_py_backend.errors import LoadError
from torch_py_backend.processes import child_process

# Functions that a child runs; none imports torch, so that a child costs a tenth of a second.
_TASKS = r"""
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from torch_py_backend.errors import ConfigError

def echo(value):
    return value

def ours():
    raise ConfigError("digits", "it is [wrong]", expected="something else", cure="Correct it.")

def theirs():
    raise ValueError("no such thing as /srv/secret/place/x.bin")

def long():
    raise ValueError("x" * 1_000_000)

def interrupted():
    raise KeyboardInterrupt

def crashes():
    ctypes.string_at(0)

def real_time_signal():
    os.kill(os.getpid(), 40)

def exits(code):
    os._exit(code)

def prints():
    print("größe \udcff")
    print("x" * 1_000_000, flush=True)
    os.write(1, b"by write\n")
    subprocess.run(["echo", "by echo"], check=True)
    print("größe", file=sys.stderr)
    print("at the end")

def closes(error=None):
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    for number in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.close(number)
    if error:
        raise ValueError(error)
    return "closed"

def reads():
    return sys.stdin.read()

def changes_directory():
    folder = os.path.abspath("gone")
    os.mkdir(folder)
    os.chdir(folder)
    os.rmdir(folder)
    return "moved"

def forks_and_goes_on():
    if os.fork() == 0:
        return "of the fork"
    os.wait()
    return "of the child"

def leaves_a_thread():
    threading.Thread(target=time.sleep, args=[600]).start()
    return "finished"

def leaves_a_process(note, hang):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    other = subprocess.Popen(["sleep", "600"])
    Path(note).write_text(f"{os.getpid()} {other.pid}")
    if hang:
        time.sleep(600)
    return "finished"
"""


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder; a child can import the tasks above."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tasks.py").write_text(_TASKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "tasks"), prepend=":")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def _run(task: str, seconds: float = 60, *, quiet: bool = False, **arguments: Any) -> Any:
    return child_process.run("digits", f"tasks:{task}", arguments, seconds, quiet=quiet)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"input": [{"größe → \U0001f600\n\x00\udcff": [-1, None]}]}, id="nested"),
        pytest.param("x" * 3_000_000, id="large"),
        pytest.param({"error": "only a value"}, id="looks-like-an-error"),
    ],
)
def test_result(value: Any) -> None:
    """JSON arguments go in, and what the function returns comes back."""
    assert _run("echo", value=value) == value


@pytest.mark.parametrize(
    ("task", "result"),
    [
        ("closes", "closed"),
        ("reads", ""),
        ("forks_and_goes_on", "of the child"),
        ("leaves_a_thread", "finished"),
        ("changes_directory", "moved"),
    ],
)
def test_functions_that_misbehave(
    task: str, result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed streams, threads and forks do not change the result; only the child has one.

    A file in the current folder with the name of another module is not imported.
    """
    for name in ("json", "contextlib", "torch_py_backend", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    assert _run(task) == result


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_prints(
    encoding: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the function and its children print goes to standard error, in UTF-8, or nowhere."""
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    _run("prints", quiet=True)
    assert capfd.readouterr() == ("", "")
    _run("prints")
    out, err = capfd.readouterr()
    assert out == ""
    assert {"größe \\udcff", "by write", "by echo", "größe", "at the end"} <= {*err.splitlines()}


@pytest.mark.parametrize(
    ("task", "arguments", "says"),
    [
        ("ours", {}, "model 'digits': it is [wrong]; expected something else. Correct it."),
        ("theirs", {}, "ValueError: no such thing as x.bin"),
        ("closes", {"error": "broken"}, "ValueError: broken"),
        ("long", {}, "ValueError: xxx"),
        ("interrupted", {}, "KeyboardInterrupt"),
        ("exits", {"code": 7}, "trying the model ended the process with exit code 7"),
        ("exits", {"code": 0}, "trying the model ended the process with exit code 0"),
        ("crashes", {}, "model 'digits': trying the model ended with SIGSEGV"),
        ("real_time_signal", {}, "model 'digits': trying the model ended with signal 40"),
        ("no_such_function", {}, "no_such_function"),
    ],
)
def test_errors(
    task: str,
    arguments: dict[str, Any],
    says: str,
    scratch: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Any end is a LoadError of one line; the traceback is printed, and no file is left."""
    with pytest.raises(LoadError) as refusal:
        _run(task, **arguments)
    error = str(refusal.value)
    assert says in error
    assert "\n" not in error
    assert len(error) < 1000
    assert ("server's log" in error) == ("trying the model" in error)
    assert ("in theirs" in capfd.readouterr().err) == (task == "theirs")
    assert list(scratch.iterdir()) == []


# --- ends ------------------------------------------------------------------------------------


def test_processes_end(tmp_path: Path) -> None:
    """After an answer or the time limit, the processes of a function that ignores signals end."""
    note = tmp_path / "pids"
    assert _run("leaves_a_process", note=str(note), hang=False) == "finished"
    pids = note.read_text().split()
    note.unlink()
    for seconds in (1, 5, 25, 125):  # until it has had the time to write its note
        with pytest.raises(LoadError, match=f"trying the model took longer than {seconds} seconds"):
            _run("leaves_a_process", seconds, note=str(note), hang=True)
        if note.is_file() and note.read_text():
            break
    pids += note.read_text().split()
    assert len(pids) == 4
    assert all(living.pid_ends(int(pid)) for pid in pids)


def test_a_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """The kernel kills a child when its parent is killed."""
    note = tmp_path / "pid"
    arguments = {"note": str(note), "hang": True}
    code = (
        "from torch_py_backend.processes import child_process;"
        f" child_process.run('m', 'tasks:leaves_a_process', {arguments}, 900)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while not (note.is_file() and note.read_text()):
            assert parent.poll() is None
            time.sleep(0.02)
        child, other = (psutil.Process(int(pid)) for pid in note.read_text().split())
        parent.kill()
    assert living.all_end([child])
    other.kill()
