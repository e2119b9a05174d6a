"""The files of all repositories in a cache, by the keys of their contents (`model_cache`)."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from torch_py_backend.processes import private_files
from torch_py_backend.server.object_store import Store
from torch_py_backend.server.remote_file import RemoteFile
from torch_py_backend.server.store_errors import StoreError

# Called with the bytes received so far and the total.
Progress: TypeAlias = "Callable[[int, int], None]"


@dataclass(slots=True)
class Transfer:
    """A store to read from, and its progress callbacks.

    Attributes:
        store: the store.
        progress: called when bytes are received.
        on_wait: called before this server waits for another one that fetches the same file.
    """

    store: Store
    progress: Progress
    on_wait: Callable[[], None]
    _total: int = 0
    _done: int = 0

    def begin(self, total: int) -> None:
        """Start counting a transfer of `total` bytes."""
        self._total, self._done = total, 0
        if total:
            self.progress(0, total)

    def add(self, size: int) -> None:
        """Add received bytes."""
        self._done += size
        self.progress(self._done, self._total)


class _ChangedError(Exception):
    """The file changed in the store."""


class Blobs:
    """Complete files, and parts of others.

    Args:
        folder: the folder of both.
        suffix: that of parts which can be continued.
        locked: takes the lock of the cache.
    """

    def __init__(
        self, folder: Path, suffix: str, locked: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._folder, self._suffix, self._locked = folder, suffix, locked
        # Errors of files whose contents do not match their digest, until the store reports a
        # change.
        self._wrong: dict[tuple[str, str], str] = {}

    def link(self, file: RemoteFile, link: Path) -> bool:
        """Link a file if it is there. Requires the lock of the cache."""
        blob = self._folder / file.key
        if not blob.is_file():
            return False
        # Not before it is complete: a part that is not writable could never be continued.
        blob.chmod(0o400)
        hard_link(blob, link)
        return True

    def fetch(self, transfer: Transfer, file: RemoteFile, link: Path) -> bool:
        """Fetch a file, and link it; return whether it stayed the same meanwhile.

        Raises:
            StoreError: the store fails, or has sent other contents than those of its digest.
            OSError: the file cannot be written.
        """
        if wrong := self._wrong.get((file.key, file.version)):
            raise StoreError(wrong, temporary=True)
        part = self._folder / f"{file.key}{self._suffix}"
        while True:
            with part.open("ab") as output:
                _flock(output, transfer.on_wait)
                output.seek(0, os.SEEK_END)  # another server may have added to it meanwhile
                with self._locked():
                    is_part = private_files.is_current(output.fileno(), part)
                    if self.link(file, link):  # another server has fetched it
                        transfer.add(file.size)
                        if is_part:
                            part.unlink()
                        return True
                if not is_part:  # another server removed it
                    continue
                continued = output.tell()
                try:
                    _read(transfer, file, output)
                    wrong = _difference(transfer.store, file, part)
                except _ChangedError:
                    part.unlink()
                    return False
                if not wrong:
                    with self._locked():
                        part.rename(self._folder / file.key)
                        self.link(file, link)
                    return True
                part.unlink()
                if not continued:
                    self._wrong[file.key, file.version] = wrong
                    raise StoreError(wrong, temporary=True)
                transfer.add(-output.tell())  # once more, from the start


def _read(transfer: Transfer, file: RemoteFile, output: IO[bytes]) -> None:
    """Append the missing bytes to a partial file.

    Raises:
        _ChangedError: the file changed in the store.
    """
    transfer.add(output.tell())
    try:
        for piece in transfer.store.read(file, output.tell()):
            output.write(piece)
            transfer.add(len(piece))
        output.flush()
    except StoreError:
        if transfer.store.is_unchanged(file):
            raise
        raise _ChangedError from None
    try:
        os.fsync(output.fileno())
    except OSError:  # the file may be incomplete on disk
        Path(output.name).unlink()
        raise


def _difference(store: Store, file: RemoteFile, part: Path) -> str:
    """Return how a part differs from what was listed; empty: it does not.

    Raises:
        _ChangedError: the file changed in the store.
    """
    size = part.stat().st_size
    if size != file.size:
        return f"{store.url}: {file.path} has {size} bytes; expected {file.size}."
    if file.digest is not None:
        with part.open("rb") as content:
            if file.has_digest(content):
                return ""
    elif file.etag:  # S3 has sent contents with this etag only
        return ""
    if not store.is_unchanged(file):
        raise _ChangedError
    if file.digest is None:
        return ""
    name, expected = file.digest
    return f"{store.url}: {file.path} has another {name} than its store says; expected {expected}."


def _flock(file: IO[bytes], on_wait: Callable[[], None]) -> None:
    if not private_files.try_lock(file.fileno()):
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)


def hard_link(source: Path, target: Path) -> None:
    """Hard-link a file; keep an existing target."""
    # Code is loaded from `compile_cache` only if no other user can write there.
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno != errno.EMLINK:  # ext4: 65,000 links of a file at most
            raise
        shutil.copy(source, target)
