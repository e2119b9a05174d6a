from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from children import instance

from torch_py_backend.server import cleanup
from torch_py_backend.server.cleanup import ServerFolder


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the role of /dev/shm, and one for temporary files."""
    for name in ("shm", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(cleanup, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path / "shm"


def test_an_owner_cleans_up(shared: Path) -> None:
    owner = ServerFolder()
    for folder in (owner.status, owner.path):
        assert folder.stat().st_mode & 0o777 == 0o700
    (shared / f"{owner.prefix}region").write_bytes(b"?")
    # A lock holds systemd-tmpfiles off, which removes old files in /tmp, see tmpfiles.d(5).
    descriptor = os.open(owner.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (
        instance(owner.status, "status.idle()") as process,
        instance(owner.status, "status.idle()", mark=False) as other,
    ):
        owner.close()
        assert process.process.wait(30) == -signal.SIGKILL
        assert other.process.poll() is None  # a file may name a process of another server
    owner.close()
    os.close(descriptor)
    assert list(shared.iterdir()) == []
    assert not owner.path.exists()


def test_a_file_system_that_locks_no_folders(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS, which locks only files that are open for writing."""
    lock = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    owner = ServerFolder()
    owner.close()
    assert list(shared.iterdir()) == []


def test_shared_memory_that_cannot_be_written_leaves_no_folder(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with pytest.raises(FileNotFoundError):
        ServerFolder()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_sweep_cleans_up_after_owners_that_were_killed(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cleanup, "remove", lambda *_: None)
        dead, gone = ServerFolder(), ServerFolder()
        for owner in (dead, gone):
            owner.close()  # its descriptors only, as the kernel does
    alive = ServerFolder()
    for path in list(shared.iterdir()):
        path.with_name(path.name.replace("owner", "region")).write_bytes(b"?")
    (shared / "another").write_bytes(b"?")
    shutil.rmtree(gone.path)
    cleanup.sweep()
    assert not dead.path.exists()
    assert alive.path.exists()
    names = {"another", f"{alive.prefix}owner", f"{alive.prefix}region"}
    assert {path.name for path in shared.iterdir()} == names
    alive.close()


def _precious(path: Path) -> Path:
    """Return a folder of the test's own that a forged file names: it is lost if a check fails."""
    return path.parent.parent / "precious"


def _is_another_users(path: Path) -> None:
    folder = path.parent / "torch-py-backend-a"
    _precious(path).rename(folder)
    _precious(path).symlink_to(folder)
    path.write_text(str(folder))
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(lambda path: path.write_text(str(_precious(path))), id="another folder"),
        pytest.param(
            _is_another_users,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
        ),
        pytest.param(Path.touch, id="empty"),
        pytest.param(lambda path: path.symlink_to(_precious(path) / "file"), id="a link"),
        Path.mkdir,
    ],
)
def test_a_forged_file_removes_nothing(forge: Callable[[Path], object], shared: Path) -> None:
    owner = shared / "torch_py_backend_0_owner"
    _precious(owner).mkdir()
    (_precious(owner) / "file").write_text("precious")
    forge(owner)
    (shared / "torch_py_backend_0_region").write_bytes(b"?")
    cleanup.sweep()
    assert (shared / "torch_py_backend_0_region").exists()
    assert (_precious(owner) / "file").read_text() == "precious"
