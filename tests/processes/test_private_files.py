"""Cached code must not come from other users; instances of one model load in turn."""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from children import starting

from torch_py_backend.errors import PlatformError
from torch_py_backend.processes import private_files

_ME = os.geteuid()
# Takes its turn to load a model, and holds it until it gets a line; its fork outlives it. Prints
# whether a marker existed when its turn came.
_LOADER = """
import os, sys
from torch_py_backend.processes import private_files
print("starts", flush=True)
with private_files.turn(sys.argv[1]):
    print(os.path.exists(sys.argv[2]), flush=True)
    input()
    if not os.fork():
        os.close(1)
        sys.stdin.read()  # until the end of the test
        os._exit(0)
print("done", flush=True)
"""
# As a server: a process of its own whose child is an instance.
_SERVER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    ("owner", "mode", "says"),
    [
        (_ME, 0o755, ""),
        (0, 0o644, ""),
        (_ME + 1, 0o600, f"it belongs to user {_ME + 1}"),
        (_ME, 0o620, "others may write to it (mode 620)"),
        (0, 0o602, "others may write to it (mode 602)"),
    ],
)
def test_risk(owner: int, mode: int, says: str) -> None:
    status = Mock(st_uid=owner, st_mode=stat.S_IFREG | mode)
    assert private_files.risk(status).partition(",")[0] == says


def test_created_folder_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert private_files.create(tmp_path / "a" / "cache") == ""
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "cache").stat().st_mode) == 0o700
    (tmp_path / "a").chmod(0o777)
    assert "others may write to it (mode 777)" in private_files.create(tmp_path / "a")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o777


def test_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = private_files.shared_folder()
    assert shared == tmp_path / f"torch-py-backend-{_ME}"
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700
    shared.chmod(0o770)
    with pytest.raises(PlatformError, match=r"others may write to it .mode 770.* TMPDIR"):
        private_files.shared_folder()
    shared.chmod(0o700)
    shared.rename(tmp_path / "elsewhere")
    shared.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PlatformError, match=r"it is a link.* TMPDIR"):
        private_files.shared_folder()


def _until_waiting(pid: int) -> None:
    """Until another process holds the lock that it wants: see proc_locks(5)."""
    while not re.search(rf"-> POSIX .* {pid} ", Path("/proc/locks").read_text()):
        time.sleep(0.01)


def test_instances_of_a_model_load_one_after_another(tmp_path: Path) -> None:
    """One that is killed or has forked keeps none waiting; other models and servers do not wait."""
    marker = tmp_path / "first is done"
    with starting(tmp_path) as start:
        first = start(_LOADER, "digits", marker)
        assert [first.hear(), first.hear()] == ["starts", "False"]
        waiting = [start(_LOADER, "digits", marker) for _ in range(2)]
        others = [start(_LOADER, "resnet", marker), start(_SERVER, _LOADER, "digits", marker)]
        for other in others:
            assert [other.hear(), other.hear()] == ["starts", "False"]
        for process in waiting:
            assert process.hear() == "starts"
            _until_waiting(process.pid)
        marker.touch()
        first.kill()
        # The kernel decides which of them is next.
        for process in waiting:
            process.tell()
        for process in waiting:
            assert [process.hear(), process.hear()] == ["True", "done"]
        assert [other.ask() for other in others] == ["done"] * 2


def test_a_lock_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "lock")
    with pytest.raises(OSError, match="symbolic links"), private_files.locked(tmp_path / "link"):
        pass


def test_without_a_lock_an_instance_loads_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number, error in enumerate((OSError(28, "No space left on device"), PlatformError("none"))):
        monkeypatch.setattr(private_files, "shared_folder", Mock(side_effect=error))
        with private_files.turn("digits"):
            assert caplog.text.count("load at the same time") == number + 1
