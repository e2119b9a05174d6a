"""The private folder where the instances of one server meet.

    <temporary folder>/torch-py-backend-<user>/servers/<server>/

Whoever is in holds a shared lock on the server's folder: the kernel takes it back from a process
that dies, however it dies. So a folder that nobody has locked is nobody's, and whoever comes next
removes it; the last to leave removes its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from torch_py_backend.errors import PlatformError, brief

# Others of the same user may remove a folder between its making and its locking: then once more.
_ATTEMPTS = 100


def enter(model: str) -> Rendezvous:
    """Meet the other instances of the server that started this process.

    Raises:
        PlatformError: there is no folder that only this user can change.
    """
    try:
        base = Path(tempfile.gettempdir()) / f"torch-py-backend-{os.geteuid()}"
        base.mkdir(mode=0o700, exist_ok=True)
        _refuse_foreign(model, base)
        servers = base / "servers"
        servers.mkdir(mode=0o700, exist_ok=True)
        _remove_abandoned(servers)
        return _entered(servers / _server(os.getppid()))
    except OSError as error:
        raise PlatformError(
            model,
            f"instances of one server cannot meet in the temporary folder: {brief(error)}",
            cure="Set TMPDIR to a folder that can be written.",
        ) from error


class Rendezvous:
    """A folder that lasts while somebody is in it.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path, held: int) -> None:
        self.path = path
        self._held: int | None = keep(held)

    def folder(self, name: str) -> Path:
        """A folder within."""
        path = self.path / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def leave(self) -> None:
        """Whoever is the last removes the folder; to leave twice is no error."""
        held, self._held = self._held, None
        if held is None:
            return
        try:
            if _alone(held):
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            release(held)


# --- locks -----------------------------------------------------------------------------------


def lock(path: Path) -> int | None:
    """A file, made where it is missing, locked for this process alone; None: another has it.

    The lock lasts until `release`, or until the process ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not _alone(descriptor):
        os.close(descriptor)
        return None
    return keep(descriptor)


def keep(descriptor: int) -> int:
    """The descriptor, which is closed in children that the model forks: until `release`."""
    _inherited.add(descriptor)
    return descriptor


def release(descriptor: int) -> None:
    """Close what was kept; a lock is given back."""
    _inherited.discard(descriptor)
    os.close(descriptor)


def _alone(descriptor: int) -> bool:
    """Whether the lock could be had; one that was shared before is given up otherwise."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# A child that the model forks would hold locks and connections on, after this process has died.
_inherited: set[int] = set()


def _forget() -> None:
    for descriptor in _inherited:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _inherited.clear()


os.register_at_fork(after_in_child=_forget)


# --- folders ---------------------------------------------------------------------------------


def _refuse_foreign(model: str, base: Path) -> None:
    """Others could take part, or see what is exchanged."""
    found = base.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        problem = "is no folder"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}"
    elif mode & 0o077:
        problem = f"has mode {mode:04o}"
    else:
        return
    raise PlatformError(
        model,
        f"{base} {problem}",
        expected=f"a folder of user {os.geteuid()} with mode 0700, where its instances meet",
        cure="Remove it, or set TMPDIR to a folder of the user that the server runs as.",
    )


def _server(process: int) -> str:
    """The server's process: number, start and namespace, which together no other ever has."""
    text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    # The name, in brackets, may hold anything; the start is the 22nd field, see proc(5).
    started = text.rpartition(")")[2].split()[19]
    return f"{process}-{started}-{Path('/proc/self/ns/pid').stat().st_ino}"


def _entered(path: Path) -> Rendezvous:
    for _ in range(_ATTEMPTS):
        path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            held = _opened(path)
            # Waits only for one that is about to remove the folder.
            fcntl.flock(held, fcntl.LOCK_SH)
            if _is(path, held):
                return Rendezvous(path, held)
            os.close(held)
    raise OSError(errno.EAGAIN, "it is removed as often as it is made", str(path))


def _remove_abandoned(base: Path) -> None:
    """Folders of servers whose instances are all gone, however they went."""
    for path in base.iterdir():
        try:
            held = _opened(path)
        except OSError:  # it is gone already, or no folder
            continue
        try:
            if _alone(held) and _is(path, held):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(held)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is(path: Path, descriptor: int) -> bool:
    """Whether the folder still has that name: it may have been removed and made again."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
