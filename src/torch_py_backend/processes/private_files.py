"""Folders and files that nobody else may write: what is run from a cache must be the user's own."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)


def risk(status: os.stat_result) -> str:
    """Who else could have written a file or folder, as a clause; empty: nobody.

    Root is nobody else: it can do anything anyway, and images are filled by it.
    """
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, and this process runs as {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def make(folder: Path) -> str:
    """Make a folder that only this user may enter; what is wrong with one that is there already.

    Raises:
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return risk(folder.stat())


def read(path: Path) -> bytes:
    """A file that nobody else could have written.

    Raises:
        PermissionError: somebody else could have.
        OSError: it cannot be read, or is no regular file: a link leads to what others may choose.
    """
    # What is asked of the descriptor holds for what is read from it. A pipe must not be waited for.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags), "rb") as file:  # noqa: PTH123  a descriptor
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path.name} is no regular file")
        if reason := risk(status):
            raise PermissionError(reason)
        return file.read()


def of_user() -> Path:
    """This user's folder for what is compiled here; other users cannot take its place.

    Its name is known beforehand, so that instances share it. A folder of that name that another
    user has put there is left alone, and a new one is made.
    """
    folder = Path(tempfile.gettempdir()) / f"torch-py-backend-{os.geteuid()}"
    try:
        reason = make(folder)
        if folder.is_symlink():
            reason = "it is a link"
    except OSError as error:
        reason = error.strerror or str(error)
    if not reason:
        return folder
    log.warning("%s is not used: %s.", folder, reason)
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
