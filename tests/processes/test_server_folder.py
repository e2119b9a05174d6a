"""The folder that the instances of one server share, and its removal."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from children import Start, starting

from torch_py_backend.errors import PlatformError
from torch_py_backend.processes import private_files, server_folder

_SECONDS = 60
# Prints its folder; leaves at each line of its stdin.
_MEMBER = """
import sys
from torch_py_backend.processes import server_folder
folder = server_folder.enter("digits")
print(folder.path, flush=True)
for line in sys.stdin:
    folder.leave()
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
folder = server_folder.enter("digits")
read, write = os.pipe()
child = os.fork()
if not child:
    os.write(write, b"!")
    time.sleep(60)
os.read(read, 1)  # the fork has closed its descriptors
print(folder.path, child, flush=True)
input()
"""
# Takes its turn to load a model, and holds it until it gets a line; its fork outlives it. Prints
# whether a marker existed when its turn came.
_LOADER = """
import os, sys
from torch_py_backend.processes import server_folder
print("starts", flush=True)
with server_folder.turn(sys.argv[1]):
    print(os.path.exists(sys.argv[2]), flush=True)
    input()
    if not os.fork():
        os.close(1)
        sys.stdin.read()  # until the end of the test
        os._exit(0)
print("done", flush=True)
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


def test_instances_of_one_server_share_a_folder(start: Start) -> None:
    """Children of one process get the same private folder; those of another, another one.

    The last instance removes it, also if all leave at the same time.
    """
    members = [start(_MEMBER) for _ in range(3)]
    (folder,) = {Path(member.hear()) for member in members}
    for path in (folder, folder.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert path.stat().st_uid == os.geteuid()
    assert start(_SERVER, _MEMBER).hear() != str(folder)
    assert members.pop().ask() == "left"
    assert folder.is_dir()
    for member in members:
        member.tell()
    assert {member.hear() for member in members} == {"left"}
    assert not folder.exists()


def test_leaving_twice(temporary: Path) -> None:
    """The second call has no effect on instances that entered meanwhile."""
    first = server_folder.enter("digits")
    first.leave()
    second = server_folder.enter("digits")
    first.leave()
    assert second.path.is_dir()
    second.leave()
    assert not any((_base(temporary) / "servers").iterdir())


def test_folders_of_killed_servers_are_removed(start: Start, temporary: Path) -> None:
    """The next server removes them, but no folder that is in use."""
    dead, living = start(_SERVER, _MEMBER), start(_SERVER, _MEMBER)
    abandoned, used = Path(dead.hear()), Path(living.hear())
    os.kill(_children(dead.pid)[0], 9)
    dead.process.wait()
    assert abandoned.is_dir()
    server_folder.enter("digits").leave()
    assert not abandoned.exists()
    assert used.is_dir()
    os.kill(_children(living.pid)[0], 9)


def test_a_killed_instance_does_not_remove_the_folder(start: Start) -> None:
    """The others use it until the last one leaves."""
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


def test_forked_processes_hold_no_locks(start: Start, temporary: Path) -> None:
    """A process that a model forked does not keep the locks of its parent, which is killed."""
    parent = start(_FORKING)
    path, child = parent.hear().split()
    server_folder.enter("digits").leave()
    assert Path(path).is_dir()
    parent.kill()
    try:
        server_folder.enter("digits").leave()
        assert not Path(path).exists()
    finally:
        os.kill(int(child), 9)


def _shared(base: Path) -> None:
    base.mkdir()
    base.chmod(0o770)


def _link(base: Path) -> None:
    elsewhere = base.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    base.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("create", "says"),
    [
        (_shared, "others may write to it .mode 770"),
        (_link, "it is a link"),
        (Path.touch, "File exists"),
    ],
)
def test_unsafe_folders_are_refused(
    create: Callable[[Path], None], says: str, temporary: Path
) -> None:
    """A folder that others can write to is an error, with its cure."""
    create(_base(temporary))
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


def test_no_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error names the variable to set."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(PlatformError, match=r"No usable temporary directory.* Set TMPDIR"):
        server_folder.enter("digits")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(PlatformError, match="set TMPDIR"):
        server_folder.enter("digits")


def test_foreign_entries_are_left_alone(temporary: Path) -> None:
    """Files and links beside the folders of servers are kept."""
    servers = _base(temporary) / "servers"
    kept = [_base(temporary) / "compiled", temporary / "outside"]
    for folder in (_base(temporary), servers, *kept):
        folder.mkdir(mode=0o700)
    (servers / "notes").write_text("mine")
    (servers / "link").symlink_to(temporary / "outside")
    server_folder.enter("digits").leave()
    assert (servers / "notes").is_file()
    assert all(folder.is_dir() for folder in kept)


def _children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(word) for word in text.split()]


# --- turns -----------------------------------------------------------------------------------


def _until_waiting(pid: int) -> None:
    """Wait until a process waits for a lock that another one holds: see proc_locks(5)."""
    end = time.monotonic() + _SECONDS
    while not re.search(rf"-> FLOCK .* {pid} ", Path("/proc/locks").read_text()):
        assert time.monotonic() < end, "it does not wait"
        time.sleep(0.01)


@pytest.mark.parametrize("killed", [False, True])
def test_instances_of_a_model_load_one_after_another(
    killed: bool, start: Start, tmp_path: Path
) -> None:
    """One that is killed, or that has forked, keeps no other waiting; other models do not wait."""
    marker = tmp_path / "first is done"
    first = start(_LOADER, "digits", marker)
    assert [first.hear(), first.hear()] == ["starts", "False"]
    second = start(_LOADER, "digits", marker)
    assert second.hear() == "starts"
    other = start(_LOADER, "resnet", marker)
    assert [other.hear(), other.hear()] == ["starts", "False"]
    _until_waiting(second.process.pid)
    marker.touch()
    if killed:
        first.kill()
    else:
        assert first.ask() == "done"
    assert second.hear() == "True"


def test_without_a_lock_an_instance_loads_at_once(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full disk."""
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(private_files, "locked", full)
    with server_folder.turn("digits"):
        assert "load at the same time: OSError: [Errno 28] No space left" in caplog.text


def test_without_the_folder_an_instance_loads_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with server_folder.turn("digits"):
        assert "Its instances load at the same time." in caplog.text
        assert "set TMPDIR" in caplog.text
