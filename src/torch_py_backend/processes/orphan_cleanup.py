"""Cleanup after a server: its processes, its regions of shared memory and its folder.

It happens in one of three ways. A server that is stopped removes all of them itself. If its owner
dies, a guard, which is a small process beside it, does the same. If both are killed, the next
server finds the owner's file without a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Triton keeps its regions
# Every process of a server inherits this variable; it names the server's status folder.
VARIABLE = "TORCH_PY_BACKEND_STATUS"
_NAME = "torch_py_backend_"
_FOLDER = "torch-py-backend-"
# The prefix that Ownership passes to Triton, and the suffix that Triton appends.
_REGION = re.compile(rb"torch_py_backend_[0-9a-f]{12}_(?!owner$)[0-9A-Za-z-]+")
_OWNER = "owner"
_ROUNDS = 20
_PAUSE_S = 0.05
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    " from torch_py_backend.processes import orphan_cleanup;"
    " orphan_cleanup.guard(*sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class Owned:
    """The resources of one server.

    Attributes:
        prefix: the prefix of the names of its regions of shared memory.
        folder: its temporary folder, which only its user can read.
    """

    prefix: str
    folder: Path

    @property
    def status_folder(self) -> Path:
        """The folder with the status files of its instances."""
        return self.folder / "status"

    @property
    def backends(self) -> Path:
        """Its backend directory."""
        return self.folder / "backends"

    def remove(self) -> None:
        """Kill the remaining processes, then remove the regions and the folder."""
        _kill_marked(self.status_folder)
        for region in SHARED_MEMORY.glob(f"{self.prefix}*"):
            with contextlib.suppress(OSError):  # owned by another user, or removed already
                region.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)


class Ownership:
    """The resources of the server of this process, until `close` or the end of the process.

    A file lock marks the ownership, and not a process ID, which means nothing in other containers.

    Raises:
        OSError: /dev/shm is full, or cannot be written.
    """

    def __init__(self) -> None:
        self.owned = Owned(
            f"{_NAME}{uuid.uuid4().hex[:12]}_", Path(tempfile.mkdtemp(prefix=_FOLDER))
        )
        self.owned.status_folder.mkdir(mode=0o700)
        self._guard: subprocess.Popen[bytes] | None = None
        self._file = -1
        path = SHARED_MEMORY / f"{self.owned.prefix}{_OWNER}"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            # Locked before it is written: `sweep` ignores an empty file.
            fcntl.flock(self._file, fcntl.LOCK_EX)
            os.write(self._file, os.fsencode(self.owned.folder))
        except BaseException:
            self.close()
            raise

    def start_guard(self) -> None:
        """Start the process that cleans up when this one dies."""
        package = Path(__file__).parents[2]
        command = [sys.executable, "-I", "-S", "-c", _START, str(package)]
        self._guard = subprocess.Popen(  # noqa: S603  this Python, this package
            [*command, self.owned.prefix, str(self.owned.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # Signals to this process group, such as Ctrl-C or `kill -9 -group`, must not reach it.
            start_new_session=True,
            cwd="/",
        )

    def close(self) -> None:
        """Remove the resources, and release the lock. May be called twice."""
        self.owned.remove()
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.kill()
            guard.communicate()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def guard(prefix: str, folder: str) -> None:
    """Wait until the owner has ended, and clean up after it; called in the guard process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Nothing is written to this pipe: it is closed when the owner ends.
    while os.read(0, 1):
        pass
    Owned(prefix, Path(folder)).remove()


def sweep() -> list[str]:
    """Clean up after servers whose owners and guards were killed; return their prefixes."""
    prefixes = []
    for path in sorted(SHARED_MEMORY.glob(f"{_NAME}*_{_OWNER}")):
        with contextlib.suppress(OSError), _abandoned(path) as owned:
            owned.remove()
            prefixes.append(owned.prefix)
    return prefixes


@contextlib.contextmanager
def _abandoned(path: Path) -> Iterator[Owned]:
    """Lock an owner's file, and yield the resources of the dead owner.

    Raises:
        OSError: another process holds the lock, or no `Ownership` of this user wrote the file.
    """
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = Path(os.fsdecode(os.read(file, 4096)))
        users = {os.fstat(file).st_uid}
        with contextlib.suppress(FileNotFoundError):
            users.add(folder.lstat().st_uid)
        if users != {os.getuid()} or not folder.name.startswith(_FOLDER) or folder.is_symlink():
            raise PermissionError(path)
        yield Owned(path.name.removesuffix(_OWNER), folder)
    finally:
        os.close(file)


def region() -> str:
    """Return the name of the shared memory between Triton and this process; empty if unknown.

    Triton passes it on the command line of its stub. Only names of `Ownership` are recognized.
    """
    with contextlib.suppress(OSError):
        words = Path("/proc/self/cmdline").read_bytes().split(b"\0")
        return next((os.fsdecode(word) for word in words if _REGION.fullmatch(word)), "")
    return ""


def remove_region(name: str) -> None:
    """Remove the region of a process that died: Triton 24.10 keeps it until the server ends.

    Processes that have mapped it can still use it.
    """
    if _REGION.fullmatch(os.fsencode(name)):
        with contextlib.suppress(OSError):  # Triton has removed it
            (SHARED_MEMORY / name).unlink()


def _kill_marked(status_folder: Path) -> None:
    """Kill every process of a server, which is identified by its status folder."""
    # Until two rounds in a row find none: a process may start another meanwhile, and the kernel
    # does not show the environment of a process during exec().
    was_empty = False
    for _ in range(_ROUNDS):
        marked = [pid for pid in _processes() if is_marked(pid, status_folder)]
        for pid in marked:
            kill(pid, status_folder)
        if was_empty and not marked:
            return
        was_empty = not marked
        time.sleep(_PAUSE_S)


def kill(pid: int, status_folder: Path) -> bool:
    """Kill a process if it belongs to the server with this status folder; return whether it did."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # the process has ended, or the kernel does not support pidfds
        handle = -1
    try:
        # Checked after the pidfd is open: from then on, its process ID is not used again.
        if not is_marked(pid, status_folder):
            return False
        with contextlib.suppress(ProcessLookupError):
            if handle >= 0:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
        return True
    finally:
        if handle >= 0:
            os.close(handle)


def is_marked(pid: int, status_folder: Path) -> bool:
    """Return whether a process runs that the server with this status folder has started.

    False for processes of other users, whose environment cannot be read.
    """
    return _mark(status_folder) in _environment(pid)


def is_foreign(pid: int, status_folder: Path) -> bool:
    """Return whether a process runs that this server certainly has not started."""
    variables = _environment(pid)
    return variables != [b""] and _mark(status_folder) not in variables


def _environment(pid: int) -> list[bytes]:
    """Return the variables of a process; one empty string if they cannot be read."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return [b""]


def _processes() -> list[int]:
    """Return the IDs of all other processes."""
    names = {path.name for path in Path("/proc").iterdir()} - {str(os.getpid())}
    return [int(name) for name in names if name.isdecimal()]


def _mark(status_folder: Path) -> bytes:
    return os.fsencode(f"{VARIABLE}={status_folder}")
