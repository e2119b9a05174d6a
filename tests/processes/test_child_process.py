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

# What a child runs; it does not import torch, so that a child costs a tenth of a second.
_TASKS = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from torch_py_backend.errors import ConfigError

def execute(code, **values):
    names = globals() | values
    exec(code, names)
    return names.get("result")
"""
_CLOSES = "for file in (sys.stdin, sys.stdout, sys.stderr): file.close()\n"
_FORKS = """
if os.fork():
    os.wait()
    result = "of the child"
else:
    result = "of the fork"
"""
_LOSES_ITS_FOLDER_AND_LEAVES_A_THREAD = """
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
threading.Thread(target=time.sleep, args=[600]).start()
result = "finished"
"""
_PRINTS = r"""
print("größe \udcff")
print("x" * 1_000_000, flush=True)
os.write(1, b"by write\n")
subprocess.run(["echo", "by echo"], check=True)
print("größe", file=sys.stderr)
print("at the end")
"""
# Writes down its process and one that it starts; ignores signals.
_STARTS = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
other = subprocess.Popen(["sleep", "600"])
Path({!r}).write_text(f"{{os.getpid()}} {{other.pid}}")
"""
_HANGS = _STARTS + "time.sleep(600)"
_VALUE = {"error": "only a value", "größe → \U0001f600\n\x00\udcff": [-1, None]}


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


def _run(code: str, seconds: float = 60, *, quiet: bool = False) -> Any:
    arguments = {"code": code, "value": _VALUE}
    return child_process.run("tasks:execute", arguments, seconds, quiet=quiet)


@pytest.mark.parametrize(
    ("code", "result"),
    [
        pytest.param("result = value", _VALUE, id="JSON goes there and back"),
        pytest.param(f"result = sys.stdin.read()\n{_CLOSES}", "", id="reads and closes"),
        pytest.param(_FORKS, "of the child", id="forks"),
        pytest.param(_LOSES_ITS_FOLDER_AND_LEAVES_A_THREAD, "finished", id="a folder and a thread"),
    ],
)
def test_results_also_of_functions_that_misbehave(
    code: str, result: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a file in the current folder imported that has the name of a module."""
    for name in ("json", "contextlib", "torch_py_backend", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    assert _run(code) == result


def test_prints_go_to_standard_error_in_utf_8_or_nowhere(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    _run(_PRINTS, quiet=True)
    assert capfd.readouterr() == ("", "")
    _run(_PRINTS)
    out, err = capfd.readouterr()
    assert out == ""
    assert {"größe \\udcff", "by write", "by echo", "größe", "at the end"} <= {*err.splitlines()}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "raise ConfigError('it is [wrong]', expected='other', cure='Correct it.')",
            "it is [wrong]; expected other. Correct it.",
        ),
        (
            f"{_CLOSES}raise ValueError('no /srv/secret/place/x.bin' + ' x' * 1_000_000)",
            "ValueError: no x.bin x x",
        ),
        ("os._exit(0)", "ended the process with exit code 0"),
        ("os.kill(os.getpid(), 40)", "ended the process with signal 40"),
        ("import nowhere", "No module named 'nowhere'"),
    ],
)
def test_errors(code: str, says: str, scratch: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LoadError) as refusal:
        _run(code)
    error = str(refusal.value)
    assert says in error
    assert "\n" not in error
    assert len(error) < 1000
    if "nowhere" in code:
        assert "in execute" in capfd.readouterr().err
    assert list(scratch.iterdir()) == []


def test_processes_end(tmp_path: Path) -> None:
    """After an answer, and after the time limit, although they ignore signals."""
    note = tmp_path / "pids"
    _run(_STARTS.format(str(note)))
    pids = note.read_text().split()
    note.unlink()
    for seconds in (1, 5, 25, 125):  # until it has had the time to write its note
        with pytest.raises(LoadError, match=f"trying the model took longer than {seconds} seconds"):
            _run(_HANGS.format(str(note)), seconds)
        if note.is_file() and note.read_text():
            break
    pids += note.read_text().split()
    assert len(pids) == 4
    living.wait([one for one in psutil.process_iter() if str(one.pid) in pids])


def test_a_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    arguments = {"code": _HANGS.format(str(note))}
    code = (
        "from torch_py_backend.processes import child_process;"
        f" child_process.run('tasks:execute', {arguments}, 900)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while not (note.is_file() and note.read_text()):
            assert parent.poll() is None
            time.sleep(0.02)
        child, other = (psutil.Process(int(pid)) for pid in note.read_text().split())
        parent.kill()
    living.wait([child])
    other.kill()
