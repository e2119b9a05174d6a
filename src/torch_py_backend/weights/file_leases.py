"""Mapped files kept from changing under a model: who writes into one waits until it is copied.

A file that is replaced by renaming keeps its pages for those who have mapped it. One that is
written over in place, as `cp` does it, would change the weights in mid-answer, and one that is cut
short ends whoever reads them with SIGBUS. A read lease makes the kernel tell us before it lets such
a writer go on (fcntl(2), "Leases"): the pages are copied then, and the file is free.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import signal
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

# Of Linux, for fcntl(2) and mremap(2); Python does not name them.
_F_SETSIG = 10
_F_SETOWN_EX = 15
_F_OWNER_TID = 0
_MREMAP_MAYMOVE_FIXED = 3
# The kernel tells a thread with this one; nobody else uses it, and no other thread gets it.
_SIGNAL = signal.SIGRTMIN + 7
# How often files are looked at that give no lease.
_POLL_S = 1.0
# Copied at a time: what copying needs beside the copy.
_CHUNK = 64 << 20


@dataclass(slots=True)
class _File:
    """A mapped file.

    Attributes:
        path: under which it was opened; another may lie there by now.
        descriptor: which holds the lease.
        leased: whether the kernel tells us of writers.
        modified: when it was last written into.
    """

    path: Path
    descriptor: int
    leased: bool
    modified: int


class Guard:
    """Watches the files that a model's weights are mapped from, until it is closed.

    Args:
        model: the model's name.
        paths: the files.
        ranges: the addresses that they are mapped to.
    """

    def __init__(
        self, model: str, paths: Iterable[Path], ranges: Sequence[tuple[int, int]]
    ) -> None:
        self._model = model
        self._paths = list(paths)
        self._ranges = ranges
        self._files: list[_File] = []
        self._ended = threading.Event()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(ready,), name="guarding", daemon=True
        )
        self._thread.start()
        ready.wait()

    def close(self) -> None:
        """Let the files go."""
        self._ended.set()
        if self._thread.is_alive():
            signal.pthread_kill(self._thread.ident or 0, _SIGNAL)
            self._thread.join()

    def _watch(self, ready: threading.Event) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {_SIGNAL})
        self._files = [_open(path) for path in self._paths]
        ready.set()
        try:
            while self._files and not self._ended.is_set():
                unleased = any(not file.leased for file in self._files)
                if unleased:
                    signal.sigtimedwait({_SIGNAL}, _POLL_S)
                else:
                    signal.sigwaitinfo({_SIGNAL})
                self._files = [file for file in self._files if self._unchanged(file)]
        finally:
            for file in self._files:
                os.close(file.descriptor)

    def _unchanged(self, file: _File) -> bool:
        if file.leased:
            # Of a lease that is being broken, the kernel tells what it is to become.
            if fcntl.fcntl(file.descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK:
                return True
            log.warning(
                "model '%s': %s is being written over in place; this instance keeps a copy of the"
                " old weights. Replace files by renaming: that needs no copy.",
                self._model,
                file.path.name,
            )
            try:
                copy(self._ranges)
            except OSError:
                log.exception(
                    "model '%s': the old weights cannot be copied, and will change under the model;"
                    " load it again.",
                    self._model,
                )
        elif os.fstat(file.descriptor).st_mtime_ns == file.modified:
            return True
        else:
            log.error(
                "model '%s': %s was written over in place while its pages were in use, so that"
                " weights may be old and new ones mixed; load the model again. Replace files by"
                " renaming.",
                self._model,
                file.path.name,
            )
        os.close(file.descriptor)  # and with it goes the lease: the writer goes on
        return False


def _open(path: Path) -> _File:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(descriptor, _F_SETSIG, _SIGNAL)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        # After F_SETLEASE, which makes the process the owner: another thread would die of it.
        owner = struct.pack("ii", _F_OWNER_TID, threading.get_native_id())
        fcntl.fcntl(descriptor, _F_SETOWN_EX, owner)
        leased = True
    except OSError:  # it belongs to another user, or its file system knows no leases
        leased = False
    return _File(path, descriptor, leased, os.fstat(descriptor).st_mtime_ns)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
)  # fmt: skip
_FAILED = ctypes.c_void_p(-1).value


def copy(ranges: Iterable[tuple[int, int]]) -> None:
    """Put copies in the place of mapped pages, at the same addresses.

    A copy that the kernel makes of a private page that was written is not enough: it goes with the
    end of the file when that is cut short.

    Raises:
        OSError: there is no memory for them.
    """
    for start, end in ranges:
        for place in range(start, end, _CHUNK):
            _replace(place, min(_CHUNK, end - place))


def _replace(place: int, size: int) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    fresh = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if fresh == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    ctypes.memmove(fresh, place, size)
    if _libc.mremap(fresh, size, size, _MREMAP_MAYMOVE_FIXED, place) == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
