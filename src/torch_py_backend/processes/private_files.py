"""Folders and files that only this user can write: cached code must not come from other users."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if it is missing.

    The kernel releases the lock when the process ends.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "rb") as file:  # noqa: PTH123  a descriptor
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # A process that was forked meanwhile keeps the file open, and the lock with it.
            fcntl.flock(file, fcntl.LOCK_UN)


def try_lock(descriptor: int) -> bool:
    """Try to take an exclusive lock; return whether it was taken.

    If the descriptor has a shared lock, that may get lost.
    """
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def is_current(descriptor: int, path: Path) -> bool:
    """Return whether a path still names an open file or folder, which may have been replaced."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    return False


def shared_folder() -> tuple[Path, str]:
    """Create this user's folder in the temporary folder, which all of its processes share.

    Returns:
        The folder, and why it must not be used; empty: it may be.
    """
    folder = Path(tempfile.gettempdir()) / f"torch-py-backend-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        reason = risk(folder.stat())
    except OSError as error:
        reason = error.strerror or str(error)
    return folder, "it is a link" if folder.is_symlink() else reason


def user_folder() -> Path:
    """Return the shared folder, or a new temporary folder if another user has created that."""
    folder, reason = shared_folder()
    if not reason:
        return folder
    log.warning("%s is not used: %s.", folder, reason)
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
