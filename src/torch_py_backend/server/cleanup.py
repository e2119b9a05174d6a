"""Cleanup after a server: its processes, its regions of shared memory and its folder.

If the owner of a server is killed, the kernel kills tritonserver, whose instances then end, and the
next server removes the rest: the owner's file has lost its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import uuid
from pathlib import Path

import psutil

from torch_py_backend.processes import instance_status

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Triton keeps its regions
_NAME = "torch_py_backend_"
_FOLDER = "torch-py-backend-"
_OWNER = "owner"
# A region of an instance: the prefix of its server, and what Triton appends.
REGION = re.compile(rf"{_NAME}[0-9a-f]{{12}}_(?!{_OWNER}$)[0-9A-Za-z-]+")


class ServerFolder:
    """The resources of one server, which are removed when this is closed.

    A locked file marks the owner, and not a process ID, which means nothing in other containers.

    Attributes:
        prefix: the prefix of the names of its regions of shared memory.
        path: its temporary folder, with the `status` files of its instances and its `backends`.
    """

    def __init__(self) -> None:
        self.prefix = f"{_NAME}{uuid.uuid4().hex[:12]}_"
        self.path = Path(tempfile.mkdtemp(prefix=_FOLDER))
        self.status, self.backends = self.path / "status", self.path / "backends"
        self._locks: list[int] = []
        try:
            self.status.mkdir(mode=0o700)
            owner = SHARED_MEMORY / f"{self.prefix}{_OWNER}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            self._locks.append(os.open(owner, flags, 0o600))
            # Locked before it is written: `sweep` ignores an empty file.
            fcntl.flock(self._locks[0], fcntl.LOCK_EX)
            os.write(self._locks[0], os.fsencode(self.path))
            # systemd-tmpfiles, which removes old files in /tmp, leaves locked folders alone. Other
            # file systems, such as NFS, may not lock folders.
            self._locks.append(os.open(self.path, os.O_RDONLY))
            with contextlib.suppress(OSError):
                fcntl.flock(self._locks[1], fcntl.LOCK_EX)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the resources, and release the locks. May be called twice."""
        remove(self.prefix, self.path)
        while self._locks:
            os.close(self._locks.pop())


def remove(prefix: str, folder: Path) -> None:
    """Kill the remaining instances of a server, then remove its regions and its folder."""
    status = folder / "status"
    for path in instance_status.files(status):
        # ValueError: a damaged name.
        with contextlib.suppress(psutil.Error, ValueError):
            process = psutil.Process(int(path.stem))
            if belongs_to_server(process, status):
                process.kill()
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # owned by another user
            region.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Clean up after servers whose owners were killed."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    for path in SHARED_MEMORY.glob(f"{_NAME}*_{_OWNER}"):
        # OSError: it is no file of this user, or another process holds the lock. ValueError: it
        # contains no path, but a null byte.
        with contextlib.suppress(OSError, ValueError), open(os.open(path, flags), "r+b") as file:  # noqa: PTH123
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = Path(os.fsdecode(file.read(4096)))
            # This may run as root, for a file that another user has written.
            is_own = os.fstat(file.fileno()).st_uid == os.getuid()
            if is_own and folder.name.startswith(_FOLDER):
                remove(path.name.removesuffix(_OWNER), folder)


def belongs_to_server(process: psutil.Process, status_folder: Path) -> bool | None:
    """Return whether the server with this status folder has started a process; None: unknown.

    It may have ended, or the kernel does not show its environment during exec().
    """
    with contextlib.suppress(psutil.Error, OSError):
        if variables := process.environ():
            return bool(variables.get(instance_status.VARIABLE) == str(status_folder))
    return None
