from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torch_py_backend import files


def test_replace(tmp_path: Path) -> None:
    """A file keeps its permissions unless others are given, and no other file remains."""
    path = tmp_path / "a"
    files.replace(path, b"old")
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o600)
    files.replace(path, b"new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    files.replace(path, b"", 0o700)
    assert path.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == [path]


def test_replace_fails_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left on device"):
        files.replace(tmp_path / "a", b"new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
