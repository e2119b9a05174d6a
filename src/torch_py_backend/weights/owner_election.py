"""One of several processes owns what all use: who that is, what it offers, and when it is gone.

They meet in a folder. Who has the lock there is the owner, whether it offers yet or not: the kernel
takes the lock back from one that dies, and another is next. What the owner offers is a line of JSON
on a socket in the folder. A sharer stays connected: the owner tells it before it leaves, and waits
until it uses the offer no more.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch_py_backend.processes import server_folder

log = logging.getLogger(__name__)

_LOCK = "owner.lock"
_SOCKET = "offer.socket"
_LEAVING = b"leaving\n"
_POLL_S = 0.03
_PATIENCE_S = 5.0  # what waits longer, says for whom
_TIMEOUT_S = 5.0  # for one that is alive and does not answer
_CREDENTIALS = struct.Struct("3i")  # process, user, group: see unix(7)
_EXITING = 0x4  # the kernel's PF_EXITING


def join(folder: Path, instance: str) -> Owner | Sharer:
    """Become the owner, or share what it offers; until one or the other is so, this waits.

    Args:
        folder: where they meet: one for each thing that is owned.
        instance: who this is, for others that wait for it.
    """
    patience = time.monotonic() + _PATIENCE_S
    while True:
        held = server_folder.lock(folder / _LOCK)
        if held is not None:
            os.ftruncate(held, 0)
            os.pwrite(held, instance.encode(), 0)
            return Owner(folder, held)
        sharer = _connected(folder)
        if sharer is not None:
            return sharer
        if time.monotonic() > patience:
            patience = math.inf
            owner = (folder / _LOCK).read_text(encoding="utf-8", errors="replace")
            log.info("'%s' waits until '%s' has loaded the weights.", instance, owner)
        time.sleep(_POLL_S)


# --- the owner -------------------------------------------------------------------------------


class Owner:
    """The one process that others depend on."""

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder = folder
        self._lock: int | None = lock
        self._listening: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._sharers: list[socket.socket] = []

    def offer(self, document: Any) -> None:
        """Tell whoever asks from now on."""
        with _address(self._folder) as address:
            # Of an owner that died; nobody but the owner is here.
            (self._folder / _SOCKET).unlink(missing_ok=True)
            self._listening = socket.socket(socket.AF_UNIX)
            server_folder.keep(self._listening.fileno())
            self._listening.bind(address)
            self._listening.listen()
        line = json.dumps(document).encode() + b"\n"
        self._thread = threading.Thread(
            target=self._serve, args=(self._listening, line), name="weights", daemon=True
        )
        self._thread.start()

    def leave(self) -> None:
        """Give it up, once nobody uses it any more; to leave twice is no error."""
        if self._listening is not None:
            with contextlib.suppress(OSError):
                (self._folder / _SOCKET).unlink(missing_ok=True)
                self._listening.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        _dismiss(self._sharers)
        for one in (*self._sharers, self._listening):
            if one is not None:
                server_folder.release(one.detach())
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
            server_folder.keep(sharer.fileno())
            self._forget_the_dead()
            sharer.settimeout(_TIMEOUT_S)
            try:
                if _peer(sharer)[1] != os.geteuid():
                    raise PermissionError
                sharer.sendall(line)
            except OSError:
                server_folder.release(sharer.detach())
            else:
                self._sharers.append(sharer)

    def _forget_the_dead(self) -> None:
        for one in [one for one in self._sharers if _gone(one)]:
            self._sharers.remove(one)
            server_folder.release(one.detach())


def _dismiss(sharers: list[socket.socket]) -> None:
    """Ask them to stop; they hang up when they have."""
    until = time.monotonic() + _TIMEOUT_S
    for one in sharers:
        with contextlib.suppress(OSError):
            one.sendall(_LEAVING)
    for one in sharers:
        with contextlib.suppress(OSError):
            one.settimeout(max(0.01, until - time.monotonic()))
            one.recv(1)


# --- those that share ------------------------------------------------------------------------


class Sharer:
    """A process that uses what another one owns.

    Attributes:
        document: what the owner offers.
    """

    def __init__(self, connection: socket.socket, document: Any, status: int) -> None:
        self.document = document
        self._connection = connection
        self._status = status
        self._left = False
        self._watched = False

    def alive(self) -> bool:
        """Whether the owner lives, and with it all that it owns.

        What the kernel says of it, which begins to say so before it frees anything; a connection
        may be closed later than that.
        """
        try:
            text = os.pread(self._status, 1024, 0)
        except OSError:  # it has ended
            return False
        state, *numbers = text.rpartition(b")")[2].split()
        return state not in (b"Z", b"X") and not int(numbers[5]) & _EXITING

    def watch(self, ended: Callable[[], None]) -> None:
        """Have a function called, in a thread, once the owner is about to leave or has died.

        An owner that leaves waits until it has returned, or for as long as it has patience.
        """

        def wait() -> None:
            with contextlib.suppress(OSError):
                self._connection.recv(len(_LEAVING))
            if not self._left:
                ended()
            server_folder.release(self._connection.detach())

        self._watched = True
        threading.Thread(target=wait, name="owner", daemon=True).start()

    def leave(self) -> None:
        """Use it no more; to leave twice is no error."""
        if self._left:
            return
        self._left = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if not self._watched:  # else its thread, which may still read, closes it
            server_folder.release(self._connection.detach())
        server_folder.release(self._status)


def _connected(folder: Path) -> Sharer | None:
    """What the owner offers; None: it offers nothing yet, or it died."""
    connection = socket.socket(socket.AF_UNIX)
    server_folder.keep(connection.fileno())
    status = -1
    try:
        connection.settimeout(_TIMEOUT_S)
        with _address(folder) as address:
            connection.connect(address)
        process, user, _ = _peer(connection)
        if user != os.geteuid():
            raise PermissionError
        status = server_folder.keep(os.open(f"/proc/{process}/stat", os.O_RDONLY | os.O_CLOEXEC))
        document = json.loads(_line(connection))
        if _gone(connection):  # and its number, perhaps, is another process's by now
            raise EOFError
        connection.settimeout(None)
        return Sharer(connection, document, status)
    except (OSError, EOFError):
        server_folder.release(connection.detach())
        if status >= 0:
            server_folder.release(status)
        return None


def _line(connection: socket.socket) -> bytes:
    pieces: list[bytes] = []
    while not pieces or not pieces[-1].endswith(b"\n"):
        piece = connection.recv(1 << 16)
        if not piece:
            raise EOFError
        pieces.append(piece)
    return b"".join(pieces)


# --- sockets ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """The socket's address: by its folder's descriptor, for a whole path may be too long."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{_SOCKET}"
    finally:
        os.close(descriptor)


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(told)
    return process, user, group


def _gone(connection: socket.socket) -> bool:
    """Whether the other end has hung up."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
