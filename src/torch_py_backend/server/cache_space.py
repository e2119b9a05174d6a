"""Space in the cache of repositories: what servers use stays, the least recently used is removed.

All methods require the lock of the cache (`model_cache`). Servers that fetch at the same time may
exceed the limit together; the next fetch removes what is too much.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from rich import filesize

from torch_py_backend.processes import private_files
from torch_py_backend.server.store_errors import StoreError

LOCK = "lock"


class CacheSpace:
    """The space that one server may use in a cache.

    Args:
        folder: the cache, see `model_cache`.
        own: the folder of this server.
        limit: how many bytes the blobs and parts may take.
        suffix: that of parts which can be continued.
    """

    def __init__(self, folder: Path, own: Path, limit: int, suffix: str) -> None:
        self._folder, self._own, self._limit, self._suffix = folder, own, limit, suffix
        self._blobs, self._snapshots = folder / "blobs", folder / "snapshots"

    def make_room(self, url: str, missing: Mapping[str, int], last: str) -> None:
        """Remove what is unused until the missing files fit.

        Args:
            url: for the error.
            missing: the sizes of the files by key.
            last: the last snapshot of this URL, which is removed after all others.

        Raises:
            StoreError: they do not fit. Nothing is removed if they could not fit anyway.
        """
        snapshots = self.used()
        inodes = _inodes(*snapshots, self._folder / "servers")
        in_use = unused = fetched = 0
        for blob, status in _statuses(self._blobs):
            if blob.suffix != ".part":
                is_used = status.st_ino in inodes
            elif not blob.name.endswith(self._suffix) and _unlink_part(blob):
                continue
            elif _key(blob) in missing:
                fetched += status.st_size
                continue
            else:
                is_used = _is_locked(blob)
            in_use += status.st_size if is_used else 0
            unused += 0 if is_used else status.st_size
        needed = sum(missing.values())
        needs = f"{url} needs {filesize.decimal(needed)} more in {self._folder}"
        if in_use + needed > self._limit:
            raise StoreError(
                f"{needs}, where servers use {filesize.decimal(in_use)}; expected at most"
                f" {filesize.decimal(self._limit)}. Raise --cache-size, or stop a server.",
                temporary=True,
            )
        removals = self._removals(snapshots, missing.keys(), last)
        while in_use + unused + needed > self._limit or self._free() <= needed - fetched:
            cannot_fit = self._free() + unused <= needed - fetched
            freed = None if cannot_fit else next(removals, None)
            if freed is None:
                raise StoreError(
                    f"{needs}, and its disk has {filesize.decimal(self._free())} left. Free some,"
                    " or name another folder with --cache.",
                    temporary=True,
                )
            unused -= freed

    def used(self) -> set[Path]:
        """Return the snapshots that servers use; remove the folders of servers that were killed."""
        used: set[Path] = set()
        for server in (self._folder / "servers").iterdir():
            if server != self._own and not _is_locked(server / LOCK):
                shutil.rmtree(server, ignore_errors=True)
                continue
            with contextlib.suppress(FileNotFoundError):  # the server is stopping
                used |= {link.resolve() for link in server.iterdir() if link.is_symlink()}
        return used

    def _removals(self, used: set[Path], missing: Collection[str], last: str) -> Iterator[int]:
        """Remove what is unused, one after the other; yield how many bytes that freed."""
        unused = [path for path in self._snapshots.iterdir() if path.resolve() not in used]
        unused.sort(key=lambda path: (path.name == last, path.stat().st_mtime))
        yield self._remove_unlinked(missing)
        for snapshot in unused:
            # Renamed first: a snapshot is always complete.
            gone = snapshot.rename(self._own / snapshot.name)
            shutil.rmtree(gone, ignore_errors=True)
            yield self._remove_unlinked(missing)

    def _remove_unlinked(self, missing: Collection[str]) -> int:
        """Remove blobs that no snapshot uses and parts that no server fetches."""
        freed = 0
        for blob, status in _statuses(self._blobs):
            if _key(blob) in missing:
                continue
            if blob.suffix == ".part":
                freed += status.st_size if _unlink_part(blob) else 0
            elif status.st_nlink == 1:
                blob.unlink()
                freed += status.st_size
        return freed

    def _free(self) -> int:
        return shutil.disk_usage(self._folder).free


def _key(blob: Path) -> str:
    return blob.name.partition(".")[0]


def _statuses(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files of a folder, from which others may remove some meanwhile."""
    for path in list(folder.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()


def _inodes(*folders: Path) -> set[int]:
    """Return the inodes of the files in folders, from which others may remove some meanwhile."""
    inodes = set()
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    inodes.add(Path(parent, name).stat().st_ino)
    return inodes


def _is_locked(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return not private_files.try_lock(file.fileno())
    return False


def _unlink_part(part: Path) -> bool:
    """Remove a part, unless a server is fetching it; return whether it is gone."""
    # A server that locks it between the two waits for the lock of the cache, and looks again.
    if _is_locked(part):
        return False
    part.unlink(missing_ok=True)
    return True
