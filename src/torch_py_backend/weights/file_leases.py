"""Protection of mapped files against being written over in place.

A file that is replaced by renaming keeps its pages for the processes that have mapped it. Writing
over it in place, as `cp` does, would change the weights during a request, and truncating it would
end a process that reads them with SIGBUS. With a read lease, the kernel blocks such a writer and
signals this process (fcntl(2), "Leases"), which copies the pages and then releases the file.
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

# Linux constants of fcntl(2) and mremap(2) that Python does not define.
_F_SETSIG = 10
_F_SETOWN_EX = 15
_F_OWNER_TID = 0
_MREMAP_MAYMOVE_FIXED = 3
# The signal of a lease that is being broken. Only the thread of a Guard receives it.
_SIGNAL = signal.SIGRTMIN + 7
# The interval in which files without a lease are checked.
_POLL_S = 1.0
# Bytes that are copied at once: the additional memory while copying.
_CHUNK = 64 << 20


@dataclass(slots=True)
class _File:
    path: Path  # another file may be there now
    descriptor: int  # holds the lease
    leased: bool  # whether the kernel signals writers
    modified: int  # in nanoseconds


class Guard:
    """Watches the files of a model's weights, which are mapped to `ranges`, until it is closed."""

    def __init__(
        self, model: str, paths: Iterable[Path], ranges: Sequence[tuple[int, int]]
    ) -> None:
        self._model = model
        self._paths = list(paths)
        self._ranges = ranges
        self._files: list[_File] = []
        self._closed = threading.Event()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(ready,), name="file-leases", daemon=True
        )
        self._thread.start()
        ready.wait()

    def close(self) -> None:
        """Stop watching, and release the files."""
        self._closed.set()
        if self._thread.is_alive():
            signal.pthread_kill(self._thread.ident or 0, _SIGNAL)
            self._thread.join()

    def _watch(self, ready: threading.Event) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {_SIGNAL})
        for path in self._paths:
            try:
                self._files.append(_lease(path))
            except OSError as error:  # it was removed since it was mapped
                log.warning(
                    "model '%s': %s is not protected against being written over in place: %s.",
                    self._model,
                    path.name,
                    error.strerror,
                )
        ready.set()
        try:
            while self._files and not self._closed.is_set():
                unleased = any(not file.leased for file in self._files)
                if unleased:
                    signal.sigtimedwait({_SIGNAL}, _POLL_S)
                else:
                    signal.sigwaitinfo({_SIGNAL})
                self._files = [file for file in self._files if not self._released(file)]
        finally:
            for file in self._files:
                os.close(file.descriptor)

    def _released(self, file: _File) -> bool:
        """Return whether a file was written over; if so, copy its weights and release it."""
        if file.leased:
            # For a lease that is being broken, the kernel returns the type that it changes to.
            if fcntl.fcntl(file.descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK:
                return False
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
                    "model '%s': the old weights cannot be copied, and will change while the model"
                    " is served; load it again.",
                    self._model,
                )
        elif os.fstat(file.descriptor).st_mtime_ns == file.modified:
            return False
        else:
            log.error(
                "model '%s': %s was written over in place while its pages were in use, so that its"
                " weights may be a mix of old and new ones; load the model again. Replace files by"
                " renaming.",
                self._model,
                file.path.name,
            )
        os.close(file.descriptor)  # releases the lease, and the writer continues
        return True


def _lease(path: Path) -> _File:
    """Open a file with a read lease, if the kernel grants one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(descriptor, _F_SETSIG, _SIGNAL)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        # After F_SETLEASE, which sets the process as the owner: the signal could end the process in
        # another thread.
        owner = struct.pack("ii", _F_OWNER_TID, threading.get_native_id())
        fcntl.fcntl(descriptor, _F_SETOWN_EX, owner)
        leased = True
    except OSError:  # another user owns the file, or its file system does not support leases
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
    """Replace mapped pages with copies at the same addresses.

    The copy that the kernel makes of a private page on writing is not enough: truncating the file
    unmaps it as well.

    Raises:
        OSError: there is not enough memory.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    for start, end in ranges:
        for address in range(start, end, _CHUNK):
            size = min(_CHUNK, end - address)
            new = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            if new == _FAILED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            ctypes.memmove(new, address, size)
            if _libc.mremap(new, size, size, _MREMAP_MAYMOVE_FIXED, address) == _FAILED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
