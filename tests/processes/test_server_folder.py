"""Where the instances of one server meet: nobody else does, and nothing remains."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Start, starting

from torch_py_backend.errors import PlatformError
from torch_py_backend.processes import server_folder

# Prints its folder; leaves on request, or when its stdin is closed.
_MEMBER = """
import sys
from torch_py_backend.processes import server_folder
room = server_folder.enter("digits")
print(room.path, flush=True)
for line in sys.stdin:
    room.leave()
    print("left", flush=True)
"""
# As a server: a process of its own whose children are members.
_SERVER = """
import subprocess, sys
member = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
member.wait()
"""
_FORKING = """
import os, time
from torch_py_backend.processes import server_folder
room = server_folder.enter("digits")
lock = server_folder.lock(room.path / "lock")
read, write = os.pipe()
child = os.fork()
if not child:
    os.write(write, b"!")
    time.sleep(60)
os.read(read, 1)  # what is forked has let go
print(room.path, child, flush=True)
input()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as start:
        yield start


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process's temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _base(folder: Path) -> Path:
    return folder / f"torch-py-backend-{os.geteuid()}"


def test_instances_of_one_server_meet(start: Start) -> None:
    """Children of one process get the same folder, and nobody else may look into it."""
    folders = {start(_MEMBER).hear() for _ in range(3)}
    (folder,) = map(Path, folders)
    for path in (folder, folder.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert path.stat().st_uid == os.geteuid()


def test_servers_do_not_meet(start: Start) -> None:
    """Two servers on a machine have a folder each."""
    folders = {start(_SERVER, _MEMBER).hear() for _ in range(2)}
    assert len(folders) == 2


def test_the_last_removes_it(start: Start) -> None:
    """It lasts as long as somebody is in."""
    members = [start(_MEMBER) for _ in range(3)]
    folder = Path({member.hear() for member in members}.pop())
    for member in members:
        assert folder.is_dir()
        assert member.ask() == "left"
    assert not folder.exists()


def test_all_leave_at_once(start: Start) -> None:
    """Whoever is the last by a hair removes it."""
    members = [start(_MEMBER) for _ in range(8)]
    folder = Path({member.hear() for member in members}.pop())
    for member in members:
        member.tell()
    assert {member.hear() for member in members} == {"left"}
    assert not folder.exists()


def test_leaving_twice(temporary: Path) -> None:
    """The second time does nothing, also where somebody else is in by then."""
    first = server_folder.enter("digits")
    first.leave()
    second = server_folder.enter("digits")
    first.leave()
    assert second.path.is_dir()
    second.leave()
    assert not any((_base(temporary) / "servers").iterdir())


def test_killed_members_leave_nothing(start: Start, temporary: Path) -> None:
    """What a killed server's instances have left, the next one removes; what lives, it does not."""
    dead, living = start(_SERVER, _MEMBER), start(_SERVER, _MEMBER)
    abandoned, used = Path(dead.hear()), Path(living.hear())
    os.kill(_children(dead.pid)[0], 9)
    dead.process.wait()
    assert abandoned.is_dir()
    server_folder.enter("digits").leave()
    assert not abandoned.exists()
    assert used.is_dir()
    os.kill(_children(living.pid)[0], 9)


def test_a_dead_member_does_not_take_the_folder_along(start: Start) -> None:
    """Who is left goes on in it, and is the last."""
    killed, left = start(_MEMBER), start(_MEMBER)
    folder = Path(killed.hear())
    left.hear()
    killed.kill()
    late = start(_MEMBER)
    assert Path(late.hear()) == folder
    late.ask()
    assert folder.is_dir()
    left.ask()
    assert not folder.exists()


def test_forked_children_hold_nothing(start: Start, temporary: Path) -> None:
    """A child that a model forked keeps neither folder nor locks when its parent is killed."""
    parent = start(_FORKING)
    path, child = parent.hear().split()
    held = Path(path) / "lock"
    assert server_folder.lock(held) is None
    parent.kill()
    try:
        taken = server_folder.lock(held)
        assert taken is not None
        server_folder.release(taken)
        room = server_folder.enter("digits")
        assert not held.exists()
        room.leave()
    finally:
        os.kill(int(child), 9)


def test_a_lock_is_one_processs(start: Start, temporary: Path) -> None:
    """A lock is free again once it is released."""
    room = server_folder.enter("digits")
    path = room.path / "lock"
    held = server_folder.lock(path)
    assert held is not None
    assert server_folder.lock(path) is None
    server_folder.release(held)
    again = server_folder.lock(path)
    assert again is not None
    server_folder.release(again)
    room.leave()


def _mode(base: Path) -> None:
    base.mkdir()
    base.chmod(0o777)


def _group(base: Path) -> None:
    base.mkdir()
    base.chmod(0o750)


def _link(base: Path) -> None:
    elsewhere = base.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    base.symlink_to(elsewhere)


def _file(base: Path) -> None:
    base.touch(0o700)


@pytest.mark.parametrize(
    ("lay", "says"),
    [
        (_mode, "has mode 0777"),
        (_group, "has mode 0750"),
        (_link, "is not a folder"),
        (_file, "is not a folder|File exists"),
    ],
)
def test_unsafe_folders_are_refused(lay: object, says: str, temporary: Path) -> None:
    """A folder that others can change, or that leads elsewhere, is an error with its cure."""
    lay(_base(temporary))  # type: ignore[operator]
    with pytest.raises(PlatformError, match=says) as refusal:
        server_folder.enter("digits")
    assert "TMPDIR" in str(refusal.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_foreign_folder_is_refused(temporary: Path) -> None:
    """A folder of another user is an error, although root could use it."""
    _base(temporary).mkdir(mode=0o700)
    os.chown(_base(temporary), 12345, 12345)
    with pytest.raises(PlatformError, match="belongs to user 12345"):
        server_folder.enter("digits")


def test_a_temporary_folder_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nothing can be written, the error says what to set."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(PlatformError, match="Set TMPDIR"):
        server_folder.enter("digits")


def test_foreign_entries_are_left_alone(temporary: Path) -> None:
    """A file or a link among the servers' folders is none of them."""
    _base(temporary).mkdir(mode=0o700)
    cache = _base(temporary) / "what was compiled"
    cache.mkdir()
    base = _base(temporary) / "servers"
    base.mkdir(mode=0o700)
    (base / "notes").write_text("mine")
    outside = temporary / "outside"
    outside.mkdir()
    (base / "link").symlink_to(outside)
    server_folder.enter("digits").leave()
    assert (base / "notes").is_file()
    assert outside.is_dir()
    assert cache.is_dir()


def _children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(word) for word in text.split()]
