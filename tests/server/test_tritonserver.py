"""The start and the end of a tritonserver; `tests/live` runs real ones."""

from __future__ import annotations

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


def test_a_temporary_folder_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names it, and not only /dev/shm."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ToolError, match=r"cannot be started: .*/none/torch-py-b.*It needs"):
        Server(tmp_path).start()
