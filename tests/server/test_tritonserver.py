"""The start and the end of a tritonserver; `tests/live` runs real ones."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from torch_py_backend.errors import ToolError
from torch_py_backend.server import tritonserver
from torch_py_backend.server.tritonserver import Server


def test_a_server_that_was_not_started(tmp_path: Path) -> None:
    """Its methods raise an error, but it may be stopped; its repository must exist."""
    with pytest.raises(ToolError, match="is not a folder; expected a model repository"):
        Server(tmp_path / "none")
    server = Server(tmp_path, http_port=80, grpc_port=0, metrics_port=0, address="0.0.0.0")
    assert server.http_address == "127.0.0.1:80"
    with pytest.raises(ToolError, match="call start"):
        server.wait_loaded()
    server.stop()


@pytest.mark.parametrize("in_repository", [True, False])
def test_paths_that_a_shell_changes(
    in_repository: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 24.10 would wait forever for processes that a shell starts with other arguments."""
    folder = tmp_path / "two words"
    folder.mkdir()
    if not in_repository:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
    says = "model repository '.*Rename it" if in_repository else "temporary folder '.*Set TMPDIR"
    server = Server(folder if in_repository else tmp_path)
    with pytest.raises(ToolError, match=says):
        server.start()


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ([], 30),
        (["--exit-timeout-secs", "5", "--log-verbose", "1"], 5),
        (["--exit-timeout-secs=5", "--exit-timeout-secs=7"], 7),
        (["--exit-timeout-secs=soon"], 30),
        (["--exit-timeout-secs"], 30),
    ],
)
def test_exit_timeout(arguments: list[str], seconds: int) -> None:
    """The last --exit-timeout-secs counts; other text than a number is Triton's to refuse."""
    assert tritonserver.exit_seconds(arguments) == seconds


def _stopping(child: str, on_sigterm: str) -> subprocess.Popen[bytes]:
    """Start a process with a child, in place of a tritonserver; it sleeps after SIGTERM."""
    code = (
        "import os, signal, subprocess, time;"
        f"signal.signal(signal.SIGTERM, lambda *_: {on_sigterm});"
        f"child = subprocess.Popen({child!r}, shell=True); print(flush=True)\n"
        # Not `child.wait()`: a signal just before the system call would not be handled.
        "while True: time.sleep(0.01)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.parametrize(
    ("child", "on_sigterm", "in_children", "code"),
    [
        pytest.param("exit", "None", True, -signal.SIGKILL, id="idle"),
        pytest.param("sleep 1000", "time.sleep(0.5) or os._exit(3)", True, 3, id="instance"),
        pytest.param("exit", "time.sleep(0.5) or os._exit(3)", False, 3, id="foreign"),
    ],
)
def test_a_server_without_instances_is_not_waited_for(
    child: str, on_sigterm: str, in_children: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton waits for instances that it has lost: once all have ended, it is killed.

    It ends by itself while an instance runs, or a model may run in tritonserver itself.
    """
    monkeypatch.setattr(tritonserver, "_IDLE_SECONDS", 0.2)
    with _stopping(child, on_sigterm) as process:
        tritonserver.terminate(process, 10_000, in_children=in_children)
        assert process.returncode == code


def test_a_temporary_folder_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names it, and not only /dev/shm."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ToolError, match=r"as Triton must: .*/none/torch-py-backend-"):
        Server(tmp_path).start()
