"""Cached code must not come from other users."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_py_backend.processes import private_files

_ME = os.geteuid()


@pytest.mark.parametrize(
    ("owner", "mode", "says"),
    [
        pytest.param(_ME, 0o755, "", id="mine"),
        pytest.param(0, 0o644, "", id="root's"),
        pytest.param(_ME + 1, 0o600, "it belongs to user", id="another's"),
        pytest.param(_ME, 0o620, "others may write to it (mode 620)", id="group writes"),
        pytest.param(0, 0o602, "others may write to it (mode 602)", id="all write"),
    ],
)
def test_risk(tmp_path: Path, owner: int, mode: int, says: str) -> None:
    """A file without risk can be written by this user or root only."""
    values = list(tmp_path.stat())
    values[stat.ST_UID], values[stat.ST_MODE] = owner, stat.S_IFREG | mode
    risk = private_files.risk(os.stat_result(values))
    assert risk.startswith(says)
    assert bool(risk) == bool(says)


def test_created_folder_is_private(tmp_path: Path) -> None:
    """Its mode does not depend on the umask; an existing folder is not changed."""
    before = os.umask(0)
    try:
        assert private_files.create(tmp_path / "a" / "cache") == ""
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "cache").stat().st_mode) == 0o700
    (tmp_path / "a").chmod(0o777)
    assert "others may write to it (mode 777)" in private_files.create(tmp_path / "a")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o777


def test_locked_file(tmp_path: Path) -> None:
    """The lock is exclusive, and free afterwards; a link is not followed."""
    path = tmp_path / "lock"
    path.touch()
    with path.open() as file:
        with private_files.locked(path):
            assert not private_files.try_lock(file.fileno())
        assert private_files.try_lock(file.fileno())
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"), private_files.locked(tmp_path / "link"):
        pass


def _link_to_a_folder(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "occupy", [lambda path: path.mkdir() or path.chmod(0o777), _link_to_a_folder, Path.touch]
)
def test_folder_of_another_user_is_not_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    occupy: Callable[[Path], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All processes of a user use the same folder, unless it is shared, a link or a file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = tmp_path / f"torch-py-backend-{_ME}"
    assert private_files.user_folder() == private_files.user_folder() == shared
    shared.rmdir()
    occupy(shared)
    folder = private_files.user_folder()
    assert folder != shared
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "is not used" in caplog.text
