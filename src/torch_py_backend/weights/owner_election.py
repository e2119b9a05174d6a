"""Election of an owner among the processes that share a folder, and its offer to the others.

The process that holds the lock in the folder is the owner, also before it makes its offer. The
kernel releases the lock of a process that dies, and another process becomes the owner. The offer is
a line of JSON on a socket in the folder. Sharers stay connected: an owner that closes notifies them
and waits until they have stopped using the offer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_py_backend.processes import server_folder

log = logging.getLogger(__name__)

_LOCK = "owner.lock"
_SOCKET = "offer.socket"
_LEAVING = b"leaving\n"
_POLL_S = 0.03
_PATIENCE_S = 5.0  # after this time, a process logs which one it waits for
_TIMEOUT_S = 5.0  # for a process that is alive and does not answer
_CREDENTIALS = struct.Struct("3i")  # process, user, group: see unix(7)
_EXITING = 0x4  # PF_EXITING of the kernel


def join(folder: Path, instance: str) -> Owner | Sharer:
    """Become the owner of what a folder stands for, or wait for the owner's offer."""
    patience = time.monotonic() + _PATIENCE_S
    while True:
        lock = server_folder.lock(folder / _LOCK)
        if lock is not None:
            os.ftruncate(lock, 0)
            os.pwrite(lock, instance.encode(), 0)
            return Owner(folder, lock)
        sharer = connect(folder)
        if sharer is not None:
            return sharer
        if time.monotonic() > patience:
            patience = math.inf
            owner = (folder / _LOCK).read_text(encoding="utf-8", errors="replace")
            log.info("'%s' waits until '%s' has loaded the weights.", instance, owner)
        time.sleep(_POLL_S)


# --- the owner -------------------------------------------------------------------------------


class Owner:
    """Holds the lock, and sends the owner's offer to each sharer that connects."""

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder = folder
        self._lock: int | None = lock
        self._listening: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._sharers: list[socket.socket] = []

    def offer(self, document: Mapping[str, object]) -> None:
        """Send a document to all sharers from now on."""
        with _address(self._folder) as address:
            # A socket there belongs to an owner that died: this process holds the lock.
            (self._folder / _SOCKET).unlink(missing_ok=True)
            self._listening = socket.socket(socket.AF_UNIX)
            server_folder.close_on_fork(self._listening.fileno())
            self._listening.bind(address)
            self._listening.listen()
        line = json.dumps(document).encode() + b"\n"
        self._thread = threading.Thread(
            target=self._serve, args=(self._listening, line), name="weights", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Wait until no sharer uses the offer, and release the lock; a second call does nothing."""
        if self._listening is not None:
            with contextlib.suppress(OSError):
                (self._folder / _SOCKET).unlink(missing_ok=True)
                self._listening.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        # Sharers hang up when they have stopped using the offer.
        until = time.monotonic() + _TIMEOUT_S
        for connection in self._sharers:
            with contextlib.suppress(OSError):
                connection.sendall(_LEAVING)
        for connection in self._sharers:
            with contextlib.suppress(OSError):
                connection.settimeout(max(0.01, until - time.monotonic()))
                connection.recv(1)
        for endpoint in (*self._sharers, self._listening):
            if endpoint is not None:
                server_folder.release(endpoint.detach())
        self._sharers, self._listening, self._thread = [], None, None
        if self._lock is not None:
            server_folder.release(self._lock)
            self._lock = None

    def _serve(self, listening: socket.socket, line: bytes) -> None:
        while True:
            try:
                sharer, _ = listening.accept()
            except OSError:  # it was shut down
                return
            server_folder.close_on_fork(sharer.fileno())
            for connection in [other for other in self._sharers if _hung_up(other)]:
                self._sharers.remove(connection)
                server_folder.release(connection.detach())
            sharer.settimeout(_TIMEOUT_S)
            try:
                if _peer(sharer)[1] != os.geteuid():
                    raise PermissionError
                sharer.sendall(line)
            except OSError:
                server_folder.release(sharer.detach())
            else:
                self._sharers.append(sharer)


# --- the sharers -----------------------------------------------------------------------------


class Sharer:
    """A sharer's connection to the owner.

    Attributes:
        document: the owner's offer.
    """

    def __init__(self, connection: socket.socket, document: Any, status: int) -> None:
        self.document = document
        self._connection = connection
        self._status = status
        self._closed = False
        self._watched = False

    def alive(self) -> bool:
        """Return whether the owner is alive, and with it the memory that it offers.

        The kernel marks a process as exiting before it frees its memory. The connection may be
        closed later than that.
        """
        try:
            text = os.pread(self._status, 1024, 0)
        except OSError:  # it has ended
            return False
        state, *numbers = text.rpartition(b")")[2].split()
        return state not in (b"Z", b"X") and not int(numbers[5]) & _EXITING

    def watch(self, ended: Callable[[], None]) -> None:
        """Call a function, in a thread, when the owner closes or has died.

        An owner that closes waits until the function returns, for `_TIMEOUT_S` at most.
        """

        def wait() -> None:
            with contextlib.suppress(OSError):
                self._connection.recv(len(_LEAVING))
            if not self._closed:
                ended()
            server_folder.release(self._connection.detach())

        self._watched = True
        threading.Thread(target=wait, name="owner", daemon=True).start()

    def close(self) -> None:
        """Disconnect from the owner; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if not self._watched:  # otherwise the thread of watch(), which may still read, closes it
            server_folder.release(self._connection.detach())
        server_folder.release(self._status)


def connect(folder: Path) -> Sharer | None:
    """Connect to the owner; None: it has made no offer yet, is closing, or died."""
    connection = socket.socket(socket.AF_UNIX)
    server_folder.close_on_fork(connection.fileno())
    status = -1
    try:
        connection.settimeout(_TIMEOUT_S)
        with _address(folder) as address:
            connection.connect(address)
        process, user, _ = _peer(connection)
        if user != os.geteuid():
            raise PermissionError
        status = server_folder.close_on_fork(
            os.open(f"/proc/{process}/stat", os.O_RDONLY | os.O_CLOEXEC)
        )
        received = bytearray()
        while not received.endswith(b"\n"):
            piece = connection.recv(1 << 16)
            if not piece:
                raise EOFError
            received += piece
        document, _, leaving = received.partition(b"\n")
        # A process that has hung up may have ended, and another one have its process ID.
        if leaving or _hung_up(connection):
            raise EOFError
        connection.settimeout(None)
        return Sharer(connection, json.loads(document), status)
    except (OSError, EOFError):
        server_folder.release(connection.detach())
        if status >= 0:
            server_folder.release(status)
        return None


# --- sockets ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield the address of the socket, through a descriptor: the path may be too long for it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{_SOCKET}"
    finally:
        os.close(descriptor)


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group of the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(credentials)
    return process, user, group


def _hung_up(connection: socket.socket) -> bool:
    """Return whether the other end has closed the connection."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
