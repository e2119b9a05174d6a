"""Caches whose contents are run must be this user's alone."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_py_backend.processes import private_files


def _status(path: Path, *, owner: int, mode: int) -> os.stat_result:
    """What stat() says of a path, with another owner and mode."""
    values = list(path.stat())
    values[stat.ST_UID], values[stat.ST_MODE] = owner, stat.S_IFREG | mode
    return os.stat_result(values)


_ME = os.geteuid()


@pytest.mark.parametrize(
    ("owner", "mode", "says"),
    [
        pytest.param(_ME, 0o600, "", id="mine"),
        pytest.param(_ME, 0o755, "", id="others may read"),
        pytest.param(0, 0o644, "", id="root's"),
        pytest.param(_ME + 1, 0o600, "it belongs to user", id="another's"),
        pytest.param(_ME, 0o620, "others may write to it (mode 620)", id="group writes"),
        pytest.param(_ME, 0o602, "others may write to it (mode 602)", id="all write"),
        pytest.param(0, 0o666, "others may write to it", id="root's, all write"),
    ],
)
def test_risk(tmp_path: Path, owner: int, mode: int, says: str) -> None:
    """Only what this user or root alone may write is without risk."""
    found = private_files.risk(_status(tmp_path, owner=owner, mode=mode))

    assert found.startswith(says)
    assert bool(found) == bool(says)


def test_made_folder_is_private(tmp_path: Path) -> None:
    """Nobody else may enter what is made here, whatever the umask says."""
    before = os.umask(0)
    try:
        assert private_files.create(tmp_path / "a" / "cache") == ""
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "a" / "cache").stat().st_mode) == 0o700


def test_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    """A folder that others may write is reported, and not changed."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)

    assert "others may write to it (mode 777)" in private_files.create(tmp_path / "cache")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o777


def _own(path: Path) -> None:
    path.write_bytes(b"mine")
    path.chmod(0o600)


def _shared(path: Path) -> None:
    path.write_bytes(b"mine")
    path.chmod(0o666)


def _link(path: Path) -> None:
    _own(path.with_name("target"))
    path.symlink_to("target")


def test_own_file_is_read(tmp_path: Path) -> None:
    """A file that only this user may write is read whole."""
    _own(tmp_path / "file")

    assert private_files.read(tmp_path / "file") == b"mine"


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        pytest.param(_shared, PermissionError, id="others may write"),
        pytest.param(_link, OSError, id="a link"),
        pytest.param(os.mkfifo, OSError, id="a pipe"),
        pytest.param(Path.mkdir, OSError, id="a folder"),
        pytest.param(lambda path: None, FileNotFoundError, id="nothing"),
    ],
)
def test_other_files_are_not_read(
    tmp_path: Path, write: Callable[[Path], object], kind: type[OSError]
) -> None:
    """A link, a pipe, or what others may write is refused at once."""
    write(tmp_path / "file")

    with pytest.raises(kind):
        private_files.read(tmp_path / "file")


def _strangers(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _strangers_link(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)


def test_instances_share_the_user_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one name for all processes of a user."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    assert (
        private_files.user_folder()
        == private_files.user_folder()
        == tmp_path / f"torch-py-backend-{_ME}"
    )


@pytest.mark.parametrize("take", [_strangers, _strangers_link, Path.touch])
def test_name_that_somebody_has_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    take: Callable[[Path], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever takes the name of the folder beforehand does not get what is compiled, or to run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    taken = tmp_path / f"torch-py-backend-{_ME}"
    take(taken)

    found = private_files.user_folder()

    assert found != taken
    assert found.parent == tmp_path
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert "is not used" in caplog.text
