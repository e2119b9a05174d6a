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
    """Create a folder that only this user can enter.

    Returns:
        The risk of a folder that exists already, see `risk`; empty: there is none.

    Raises:
        OSError: the folder cannot be created.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return risk(folder.stat())


def tree_risk(folder: Path) -> str:
    """Return how another user could have written a file in a folder; see `risk`.

    Files need no permissions of their own where no other user can enter the folder.
    """
    status = folder.stat()
    reason = risk(status)
    if reason or not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return reason
    for path in folder.rglob("*"):
        reason = "it is a link" if path.is_symlink() else risk(path.lstat())
        if reason:
            return f"{path.name}: {reason}"
    return ""


def shared_folder() -> Path:
    """Create this user's folder in the temporary folder, which all of its processes share.

    Raises:
        PlatformError: the folder cannot be created, or other users can write to it.
    """
    name = f"torch-py-backend-{os.geteuid()}"
    try:
        folder = Path(tempfile.gettempdir()) / name
        folder.mkdir(mode=0o700, exist_ok=True)
        reason = "it is a link" if folder.is_symlink() else risk(folder.stat())
    except OSError as error:  # also without a temporary folder
        reason = summarize(error)
    if reason:
        raise PlatformError(
            f"{name} in the temporary folder cannot be used: {reason}",
            expected=f"a folder of user {os.geteuid()} with mode 0700",
            cure="Remove it, or set TMPDIR to a folder of the user that the server runs as.",
        )
    return folder


# --- between the instances of a server ---------------------------------------------------------


def server_path(model: str, purpose: str) -> Path:
    """Return the path of a file that the instances of a model on one server share.

    Raises:
        PlatformError: the temporary folder cannot be used.
    """
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
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(server_path(model, "turn")))
        except (PlatformError, OSError) as error:  # such as a full disk
            log.warning("its instances load at the same time: %s", summarize(error))
        yield


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which exists while a process holds or awaits the lock.

    The kernel releases the lock when the process ends.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    while True:
        with open(os.open(path, flags, 0o600), "rb") as file:  # noqa: PTH123  a descriptor
            fcntl.flock(file, fcntl.LOCK_EX)
            if not is_same(path, os.fstat(file.fileno())):
                continue  # the process that held the lock before has removed the file
            try:
                yield
            finally:
                path.unlink()
                # A process that was forked meanwhile keeps the file open, and the lock with it.
                fcntl.flock(file, fcntl.LOCK_UN)
            return


def is_same(path: Path, file: os.stat_result) -> bool:
    """Return whether a path still names a file, which may have been removed or replaced."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), file)
    return False
