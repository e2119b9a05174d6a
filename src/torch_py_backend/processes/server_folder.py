"""The private folder that the instances of one server share.

    <temporary folder>/torch-py-backend-<user>/servers/<server>/

Each instance holds a shared lock on the server's folder, which the kernel releases when the
process dies. A folder without locks is abandoned: the next process removes it. The last instance
to leave removes its own folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch_py_backend.errors import PlatformError, summarize
from torch_py_backend.processes import private_files, procfs

log = logging.getLogger(__name__)

# Another process may remove a folder between its creation and its locking: then try again.
_ATTEMPTS = 100


def enter(model: str) -> ServerFolder:
    """Enter the folder of the server that started this process.

    Raises:
        PlatformError: the folder cannot be created, or other users can write to it.
    """
    try:
        base, reason = private_files.shared_folder()
        if reason:
            user = os.geteuid()
            raise PlatformError(
                model,
                f"{base} cannot be used: {reason}",
                expected=f"a folder of user {user} with mode 0700, which its instances share",
                cure="Remove it, or set TMPDIR to a folder of the user that the server runs as.",
            )
        servers = base / "servers"
        servers.mkdir(mode=0o700, exist_ok=True)
        _remove_abandoned(servers)
        path = servers / server_name(os.getppid())
        for _ in range(_ATTEMPTS):
            path.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                descriptor = _open_folder(path)
                # Blocks only while another process removes the folder.
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if private_files.is_current(descriptor, path):
                    return ServerFolder(path, descriptor)
                os.close(descriptor)
        raise OSError(errno.EAGAIN, "it is removed as often as it is created", str(path))
    except OSError as error:
        raise PlatformError(
            model,
            f"instances of one server cannot share the temporary folder: {summarize(error)}",
            cure="Set TMPDIR to a folder that can be written.",
        ) from error


class ServerFolder:
    """A shared folder, which exists while a process holds a lock on it.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = close_on_fork(descriptor)

    def folder(self, name: str) -> Path:
        """Create a folder within, and return its path."""
        path = self.path / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def address(self, name: str) -> str:
        """Return the address of a socket within: the folder's path may be too long for one."""
        return f"/proc/self/fd/{self._descriptor}/{name}"

    def leave(self) -> None:
        """Release the lock; the last process removes the folder. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            if private_files.try_lock(descriptor):
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            keep_on_fork(descriptor)
            os.close(descriptor)


@contextlib.contextmanager
def turn(model: str) -> Iterator[None]:
    """Hold a lock that the instances of a model take one after another to load it.

    The kernel releases the lock of a process that is killed.
    """
    with contextlib.ExitStack() as stack:
        try:
            server = enter(model)
            stack.callback(server.leave)
            stack.enter_context(private_files.locked(server.folder("loading") / model))
        except PlatformError as error:
            log.warning("%s Its instances load at the same time.", error)
        except OSError as error:  # such as a full disk
            log.warning(
                "model '%s': its instances load at the same time: %s.", model, summarize(error)
            )
        yield


# --- forks -----------------------------------------------------------------------------------


def close_on_fork(descriptor: int) -> int:
    """Register a descriptor to be closed in processes that the model forks; return it."""
    _inherited.add(descriptor)
    return descriptor


def keep_on_fork(descriptor: int) -> None:
    """End the registration of a descriptor, which is closed next."""
    _inherited.discard(descriptor)


# Processes that the model forks would keep locks and connections after this process has died.
_inherited: set[int] = set()


def _close_inherited() -> None:
    for descriptor in _inherited:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _inherited.clear()


os.register_at_fork(after_in_child=_close_inherited)


# --- folders ---------------------------------------------------------------------------------


def server_name(pid: int) -> str:
    """Return the unique name of a server: process ID, start time and PID namespace."""
    return f"{pid}-{procfs.start_time(pid)}-{Path('/proc/self/ns/pid').stat().st_ino}"


def _remove_abandoned(base: Path) -> None:
    """Remove the folders of servers that have no instances any more."""
    for path in base.iterdir():
        try:
            descriptor = _open_folder(path)
        except OSError:  # it was removed, or is not a folder
            continue
        try:
            if private_files.try_lock(descriptor) and private_files.is_current(descriptor, path):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
