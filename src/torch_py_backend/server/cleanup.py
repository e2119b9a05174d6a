"""Cleanup after a server: its processes, its regions of shared memory and its folder.

If the owner of a server is killed, the kernel kills tritonserver, whose instances then end, and the
next server removes the rest: the owner's file has lost its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from pathlib import Path

import psutil

from torch_py_backend.processes import instance_status

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Triton keeps its regions
# The start of the names of regions.
NAME = "torch_py_backend_"
_FOLDER = "torch-py-backend-"
_OWNER = "owner"


class ServerFolder:
    """The resources of one server, which are removed when this is closed.

    They are regions of shared memory, whose names have the `prefix`, and a temporary folder. A
    locked file marks the owner, and not a process ID, which means nothing in other containers.
    """

    def __init__(self) -> None:
        self.prefix = f"{NAME}{uuid.uuid4().hex[:12]}_"
        self.path = Path(tempfile.mkdtemp(prefix=_FOLDER))
        self.status, self.backends = self.path / "status", self.path / "backends"
        with contextlib.ExitStack() as stack:
            stack.callback(remove, self.prefix, self.path)
            self.status.mkdir(mode=0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            owner = os.open(SHARED_MEMORY / f"{self.prefix}{_OWNER}", flags, 0o600)
            stack.callback(os.close, owner)
            # Locked before it is written: `sweep` ignores an empty file.
            fcntl.flock(owner, fcntl.LOCK_EX)
            os.write(owner, os.fsencode(self.path))
            # systemd-tmpfiles, which removes old files, leaves locked folders alone
            folder = os.open(self.path, os.O_RDONLY)
            stack.callback(os.close, folder)
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            self.close = stack.pop_all().close


def remove(prefix: str, folder: Path) -> None:
    """Kill the remaining instances of a server, then remove its regions and its folder."""
    status = folder / "status"
    for path in instance_status.files(status):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(path.stem))
            if belongs_to_server(process, status):
                process.kill()
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Clean up after servers whose owners were killed."""
    for path in SHARED_MEMORY.glob(f"{NAME}*_{_OWNER}"):
        # OSError: it is no file, or is locked. Root must not do what another user's file says.
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                with path.open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    folder = Path(os.fsdecode(file.read()))
                    if folder.name.startswith(_FOLDER):
                        remove(path.name.removesuffix(_OWNER), folder)


def belongs_to_server(process: psutil.Process, status_folder: Path) -> bool | None:
    """Return whether the server with this folder has started a process; None: it is ending."""
    with contextlib.suppress(psutil.Error, OSError):
        if variables := process.environ():
            return bool(variables.get(instance_status.VARIABLE) == str(status_folder))
    return None
