"""What a server leaves that died without a chance to clean up: its processes, regions and folder.

Three nets, for each way to die. A server that is stopped removes all of it itself. A guard, a small
process beside it, sees the end of its owner and does the same. If both were killed, the next server
finds the owner's file, which nobody holds locked any more.
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
# Every process of a server has this variable from it, and with it the server's own folder.
VARIABLE = "TORCH_PY_BACKEND_VITALS"
_NAME = "torch_py_backend_"
_FOLDER = "torch-py-backend-"
# The prefix that Ownership gives Triton, and what Triton puts behind it.
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
    """What belongs to one server.

    Attributes:
        prefix: with it begin the names of its regions of shared memory.
        folder: its files; a temporary folder that only its user can read.
    """

    prefix: str
    folder: Path

    @property
    def vitals(self) -> Path:
        """Where its instances tell how they are."""
        return self.folder / "vitals"

    @property
    def backends(self) -> Path:
        """Its backend directory."""
        return self.folder / "backends"

    def remove(self) -> None:
        """End every process that is left, then remove the regions and the folder."""
        end_marked(self.vitals)
        for region in SHARED_MEMORY.glob(f"{self.prefix}*"):
            with contextlib.suppress(OSError):  # another's, or just gone
                region.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)


class Ownership:
    """What belongs to this process's server, for as long as this process lives.

    A lock says so, which ends with the process: process ids say nothing across containers.

    Raises:
        OSError: there is no room in /dev/shm, or it cannot be written.
    """

    def __init__(self) -> None:
        self.owned = Owned(
            f"{_NAME}{uuid.uuid4().hex[:12]}_", Path(tempfile.mkdtemp(prefix=_FOLDER))
        )
        self.owned.vitals.mkdir(mode=0o700)
        self._guard: subprocess.Popen[bytes] | None = None
        self._file = -1
        try:
            self._claim(SHARED_MEMORY / f"{self.owned.prefix}{_OWNER}")
        except BaseException:
            self.end()
            raise

    def _claim(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # First the lock: a file without contents tells a sweep nothing to remove.
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.write(self._file, os.fsencode(self.owned.folder))

    def guard(self) -> None:
        """Start the process that cleans up when this one dies."""
        package = Path(__file__).parents[2]
        command = [sys.executable, "-I", "-S", "-c", _START, str(package)]
        self._guard = subprocess.Popen(  # noqa: S603  this Python, this package
            [*command, self.owned.prefix, str(self.owned.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # A signal to our group, as of Ctrl-C or `kill -9 -group`, does not reach it.
            start_new_session=True,
            cwd="/",
        )

    def end(self) -> None:
        """Remove what is left, and let go. Calling it twice is no error."""
        self.owned.remove()
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.kill()
            guard.communicate()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def guard(prefix: str, folder: str) -> None:
    """The guard's own process: wait until the owner is gone, and remove what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Nothing is ever written there: it ends with the last process that holds the other end.
    while os.read(0, 1):
        pass
    Owned(prefix, Path(folder)).remove()


def sweep() -> list[str]:
    """Remove what servers left whose owners and guards died; the prefixes of what was found."""
    found = []
    for path in sorted(SHARED_MEMORY.glob(f"{_NAME}*_{_OWNER}")):
        with contextlib.suppress(OSError), _locked(path) as text:
            owned = _owned(path, text)
            if owned is not None:
                owned.remove()
                found.append(owned.prefix)
    return found


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bytes]:
    """What a file holds that nobody has locked.

    Raises:
        OSError: its owner lives, or is another user.
    """
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_uid != os.getuid():
            raise PermissionError(path)
        yield os.read(file, 4096)
    finally:
        os.close(file)


def _owned(path: Path, text: bytes) -> Owned | None:
    """What an owner's file names, if it is what we would write there."""
    folder = Path(os.fsdecode(text))
    if not text or not folder.name.startswith(_FOLDER) or folder.is_symlink():
        return None
    with contextlib.suppress(FileNotFoundError):
        if folder.stat().st_uid != os.getuid():
            return None
    return Owned(path.name.removesuffix(_OWNER), folder)


def region() -> str:
    """The region of shared memory through which Triton talks to this process; empty: none of ours.

    Triton names it to its stub on the command line, behind the model's file.
    """
    with contextlib.suppress(OSError):
        words = Path("/proc/self/cmdline").read_bytes().split(b"\0")
        return next((os.fsdecode(one) for one in words if _REGION.fullmatch(one)), "")
    return ""


def remove_region(name: str) -> None:
    """Remove the region of a process that died: Triton of 24.10 keeps it until the server ends.

    What others have mapped of it stays theirs for as long as they want.
    """
    if _REGION.fullmatch(os.fsencode(name)):
        with contextlib.suppress(OSError):  # Triton was quicker
            (SHARED_MEMORY / name).unlink()


def end_marked(vitals: Path) -> None:
    """Kill every process of the server whose instances tell in this folder."""
    # Again and again: one may start another while we look, and of one that is just about to run
    # another program the kernel tells nothing.
    none = False
    for _ in range(_ROUNDS):
        found = [pid for pid in _processes() if marked(pid, vitals)]
        for pid in found:
            kill(pid, vitals)
        if none and not found:
            return
        none = not found
        time.sleep(_PAUSE_S)


def kill(pid: int, vitals: Path) -> bool:
    """Kill a process if it is one of the server's; whether it was."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # it has ended, or this kernel has no such thing
        handle = -1
    try:
        # Asked once the process is held: its number cannot become another's in between.
        if not marked(pid, vitals):
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


def marked(pid: int, vitals: Path) -> bool:
    """Whether a process was started by the server whose instances tell in this folder.

    One that has ended, or belongs to somebody else, was not.
    """
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return _mark(vitals) in variables


def foreign(pid: int, vitals: Path) -> bool:
    """Whether a process lives that certainly was not started by that server."""
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes()
        return bool(variables) and _mark(vitals) not in variables.split(b"\0")
    return False


def _mark(vitals: Path) -> bytes:
    return os.fsencode(f"{VARIABLE}={vitals}")


def _processes() -> list[int]:
    own = os.getpid()
    numbers = (int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal())
    return [number for number in numbers if number != own]
