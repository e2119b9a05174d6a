"""Folders and files that only this user can write, and locks between processes.

Cached code must not come from other users.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch_py_backend.errors import PlatformError, summarize
from torch_py_backend.processes import procfs

log = logging.getLogger(__name__)


def risk(status: os.stat_result) -> str:
    """Return how another user could have written a file, as a clause; empty: none could.

    Root is trusted: it can do anything anyway, and container images are built by root.
    """
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, and this process runs as {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def create(folder: Path) -> str:
    """Create a folder that only this user can enter; return the `risk` of one that exists."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return risk(folder.stat())


def tree_risk(folder: Path) -> str:
    """Return the `risk` of a folder and all files in it."""
    status = folder.stat()
    reason = risk(status)
    # Where no other user can enter the folder, the modes of its files do not matter.
    if reason or not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return reason
    for path in folder.rglob("*"):
        reason = "it is a link" if path.is_symlink() else risk(path.lstat())
        if reason:
            return f"{path.name}: {reason}"
    return ""


def shared_folder() -> Path:
    """Create this user's folder for temporary files; PlatformError if others can write to it."""
    folder = Path(tempfile.gettempdir(), f"torch-py-backend-{os.geteuid()}")
    reason = create(folder) or ("it is a link" if folder.is_symlink() else "")
    if reason:
        raise PlatformError(
            f"{folder.name} in the temporary folder cannot be used: {reason}",
            expected=f"a folder of user {os.geteuid()} with mode 0700",
            cure="Remove it, or set TMPDIR to a folder of the user that the server runs as.",
        )
    return folder


def server_path(model: str, purpose: str) -> Path:
    """Return the path of a file that the instances of a model on one server share."""
    folder = shared_folder() / "servers"
    folder.mkdir(mode=0o700, exist_ok=True)
    key = hashlib.sha256(f"{model} {purpose}".encode()).hexdigest()[:16]
    return folder / f"{server_name(os.getppid())}-{key}"


def server_name(pid: int) -> str:
    """Return the unique name of a server: process ID, start time and PID namespace."""
    return f"{pid}-{procfs.start_time(pid)}-{Path('/proc/self/ns/pid').stat().st_ino}"


@contextlib.contextmanager
def turn(model: str) -> Iterator[None]:
    """Hold a lock that the instances of a model take one after another to load it."""
    key = f"{server_name(os.getppid())} {model}"
    place = int(hashlib.sha256(key.encode()).hexdigest()[:15], 16)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(shared_folder() / "locks", place))
        except (PlatformError, OSError) as error:  # such as a full disk
            log.warning("its instances load at the same time: %s", summarize(error))
        yield


@contextlib.contextmanager
def locked(path: Path, place: int = 0) -> Iterator[None]:
    """Hold the exclusive lock on a byte of a file, which need not exist.

    The kernel releases the lock when the process ends; processes that it forked do not hold it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "rb") as file:  # noqa: PTH123  a descriptor
        fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
        yield
