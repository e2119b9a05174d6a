"""Functions in child processes: each has a result, or one error of one line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import living
import psutil
import pytest

from torch_py_backend.errors import LoadError
from torch_py_backend.processes import child_process
from torch_py_backend.processes.child_process import Workers

# Functions that a child runs; none imports torch, so that a child costs a tenth of a second.
_TASKS = r"""
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

def prints_beyond_ascii():
    print("größe \udcff")
    print("größe", file=sys.stderr)
    return "printed"

def prints():
    print("by print")
    print("x" * 1_000_000, flush=True)
    os.write(1, b"by write\n")
    subprocess.run(["echo", "by echo"], check=True)
    print("at the end")
    return "printed"

def closes():
    sys.stdin.close()
    sys.stdout.close()
    sys.stderr.close()
    for number in (0, 1, 2):
        try:
            os.close(number)
        except OSError:
            pass
    return "closed"

def closes_and_raises():
    sys.stderr.close()
    raise ValueError("broken")

def reads():
    return sys.stdin.read() + os.read(0, 1).decode()

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

def crashes_after_a_fork():
    if os.fork() == 0:
        return "of the fork"
    os.wait()
    os._exit(7)

def ignores_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)

def leaves_a_thread():
    threading.Thread(target=time.sleep, args=[600]).start()
    return "finished"

def leaves_a_process(note, hang, apart):
    other = subprocess.Popen(["sleep", "600"], start_new_session=apart)
    Path(note).write_text(str(other.pid))
    if hang:
        time.sleep(600)
    return "finished"

def forks_apart(note):
    if os.fork() == 0:
        os.setsid()
        other = subprocess.Popen(["sleep", "600"])
        Path(note).write_text(f"{os.getpid()} {other.pid}")
    time.sleep(600)

def sleeps_for_ever(note):
    Path(note).write_text(str(os.getpid()))
    time.sleep(1000)

def meets(folder, number, fails):
    if number in fails:
        raise ConfigError("digits", f"number {number} fails")
    Path(folder, str(number)).touch()
    while len(os.listdir(folder)) < 3:
        time.sleep(0.01)
    print("met")
    message = yield number
    while message != "fail":
        message = yield [number, message]
    raise ConfigError("digits", f"number {number} fails later")

def echoes(value):
    yield value

def sleeps():
    seconds = yield "ready"
    while True:
        time.sleep(seconds)
        seconds = yield seconds
"""


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder; a child can import the tasks above."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tasks.py").write_text(_TASKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "tasks"), prepend=os.pathsep)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def _run(task: str, seconds: float = 60, **arguments: Any) -> Any:
    return child_process.run("digits", f"tasks:{task}", arguments, seconds)


# --- results ---------------------------------------------------------------------------------


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


def test_prints_do_not_reach_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    """What the function and its children print goes to standard error, all of it."""
    assert _run("prints") == "printed"
    out, err = capfd.readouterr()
    assert out == ""
    assert {"by print", "by write", "by echo", "at the end"} <= set(err.splitlines())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_text_that_the_environment_cannot_print(
    encoding: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is printed is UTF-8, whatever the locale is."""
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    assert _run("prints_beyond_ascii") == "printed"
    assert capfd.readouterr().err.splitlines() == ["größe \\udcff", "größe"]


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("ours", "model 'digits': it is [wrong]; expected something else. Correct it."),
        ("theirs", "ValueError: no such thing as x.bin"),
        ("closes_and_raises", "ValueError: broken"),
        ("long", "ValueError: xxx"),
        ("interrupted", "KeyboardInterrupt"),
        (
            "crashes_after_a_fork",
            "model 'digits': trying the model ended the process with exit code 7",
        ),
        ("crashes", "model 'digits': trying the model ended with SIGSEGV"),
        ("real_time_signal", "model 'digits': trying the model ended with signal 40"),
        ("no_such_function", "no_such_function"),
    ],
)
def test_errors(task: str, says: str, scratch: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Any end is a LoadError of one line; the traceback is printed, and no file is left."""
    with pytest.raises(LoadError) as refusal:
        _run(task)
    error = str(refusal.value)
    assert says in error
    assert "\n" not in error
    assert len(error) < 1000
    assert ("server's log" in error) == ("trying the model" in error)
    assert ("in theirs" in capfd.readouterr().err) == (task == "theirs")
    assert list(scratch.iterdir()) == []


# --- time ------------------------------------------------------------------------------------


def test_time_limit() -> None:
    """A function that takes too long, and ignores signals, is killed."""
    with pytest.raises(LoadError, match=r"trying the model took longer than 0\.5 seconds"):
        _run("ignores_signals", seconds=0.5)


def _run_until_timeout(task: str, note: Path, **arguments: Any) -> str:
    """Return the note of a task that hangs, with a time limit in which it can write one."""
    for seconds in (1, 5, 25, 125):
        with pytest.raises(LoadError, match="took longer"):
            _run(task, seconds=seconds, note=str(note), **arguments)
        if note.is_file() and note.read_text():
            return note.read_text()
    raise AssertionError("the task wrote no note")


def test_grandchildren_are_killed(tmp_path: Path) -> None:
    """Processes that the function started end with it, in any session, and with their own."""
    note = tmp_path / "pid"
    assert _run("leaves_a_process", note=str(note), hang=False, apart=False) == "finished"
    pids = note.read_text()
    pids += " " + _run_until_timeout("leaves_a_process", note, hang=True, apart=True)
    pids += " " + _run_until_timeout("forks_apart", tmp_path / "pids")
    assert all(living.pid_ends(int(pid)) for pid in pids.split())


def test_a_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """The kernel kills a child when its parent is killed."""
    note = tmp_path / "pid"
    code = (
        "from torch_py_backend.processes import child_process;"
        f" child_process.run('m', 'tasks:sleeps_for_ever', {{'note': {str(note)!r}}}, 900)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while not (note.is_file() and note.read_text()):
            assert parent.poll() is None
            time.sleep(0.02)
        child = psutil.Process(int(note.read_text()))
        parent.kill()
    assert living.all_end([child])


# --- workers ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _meeting(folder: Path, fails: list[int]) -> Iterator[Workers]:
    (folder / "met").mkdir()
    before = _children()
    with Workers("digits", "tasks:meets", 3) as workers:
        arguments = {"folder": str(folder / "met"), "fails": fails}
        assert workers.ask([arguments | {"number": n} for n in range(3)], 60) == [0, 1, 2]
        yield workers
    assert _children() <= before


def _children() -> set[psutil.Process]:
    """Return the children of this process."""
    return {*living.left(psutil.Process().children())}


def test_workers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Workers run at the same time; answers are in order; output is discarded."""
    with _meeting(tmp_path, []) as workers:
        assert workers.ask(["a", "b", "c"], 60) == [[0, "a"], [1, "b"], [2, "c"]]
        assert workers.ask([None], 60) == [[0, None]]
        with pytest.raises(LoadError, match="number 1 fails later"):
            workers.ask(["d", "fail"], 60)
        assert not workers.alive
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("number", [0, 2])
def test_worker_that_fails(tmp_path: Path, number: int) -> None:
    """The error is that of the worker that failed, not of those that wait for it."""
    with (
        pytest.raises(LoadError, match=f"number {number} fails"),
        _meeting(tmp_path, [number]),
    ):
        pytest.fail("it has an answer")


def test_a_late_answer_is_not_that_of_the_next_message() -> None:
    """After a time-out, no process is left to answer."""
    before = _children()
    with Workers("digits", "tasks:sleeps", 2) as workers:
        assert workers.ask([{}, {}], 60) == ["ready"] * 2
        with pytest.raises(LoadError, match=r"longer than 0\.1 seconds"):
            workers.ask([1.0, 1.0], 0.1)
        assert _children() <= before
        with pytest.raises(LoadError, match="ended"):
            workers.ask([0.0], 60)


def test_messages_larger_than_a_pipe() -> None:
    """Large messages reach every worker; a worker may end without reading them."""
    value = "x" * 1_000_000
    with Workers("digits", "tasks:echoes", 2) as workers:
        assert workers.ask([{"value": value}] * 2, 60) == [value] * 2
    with Workers("digits", "nowhere:nothing", 2) as workers, pytest.raises(LoadError):
        workers.ask([{"value": value}] * 2, 60)
