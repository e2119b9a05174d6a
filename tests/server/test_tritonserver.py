"""The start and the end of a tritonserver; `tests/live` runs real ones."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from torch_py_backend.errors import ToolError
from torch_py_backend.server.tritonserver import Server


def test_a_server_that_was_not_started(tmp_path: Path) -> None:
    """It may be stopped; its repository must exist."""
    with pytest.raises(ToolError, match="is not a folder; expected a model repository"):
        Server(tmp_path / "none")
    server = Server(tmp_path, ports=(80, 0, 0), address="0.0.0.0")
    assert server.http_address == "127.0.0.1:80"
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
    server = Server(folder if in_repository else tmp_path)
    with pytest.raises(ToolError, match=r"two words' has the character ' '.* Rename it"):
        server.start()


def test_a_temporary_folder_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names it, and not only /dev/shm."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ToolError, match=r"cannot be started: .*/none/torch-py-b.*It needs"):
        Server(tmp_path).start()
