"""Model repositories from an object store on the local disk, for all servers of this user.

    blobs/<key>             the contents of one file; `<key>.<boot>.part` is not complete
    snapshots/<name>/       the files of a repository, as hard links to blobs
    servers/<name>/models   what a server serves: a link to a snapshot
    urls/<hash>             the name of the last snapshot of a URL

A snapshot appears when it is complete, and its files never change, except those that models add
(`compile_cache`). A server changes to another one by replacing its link. Files that several
snapshots share are fetched once and, as hard links, mapped into memory once.

The lock of the cache is held while links are made and files removed, never while a store is read.
The server that holds the lock of a file's part fetches it; others wait for that lock, then find the
blob.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from torch_py_backend.errors import ServerError
from torch_py_backend.files import replace as replace_file
from torch_py_backend.processes import private_files
from torch_py_backend.server.blobs import Blobs, Progress, Transfer, hard_link
from torch_py_backend.server.cache_space import LOCK, CacheSpace
from torch_py_backend.server.object_store import Store
from torch_py_backend.server.remote_file import RemoteFile
from torch_py_backend.server.store_errors import StoreError

COMPILED = "compile_cache"
# Attempts to fetch a repository that keeps changing.
_ATTEMPTS = 3
# Errors that another folder would not fix.
_PASSING = (None, errno.EMFILE, errno.ENFILE)
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Files: TypeAlias = "Mapping[PurePosixPath, RemoteFile]"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of a repository at one time.

    Attributes:
        name: the same for the same contents.
        store: the identity of its store.
        paths: the files in the store; empty if it did not answer.
    """

    name: str
    store: str = ""
    paths: frozenset[PurePosixPath] = frozenset()


class ModelCache:
    """The files of repositories, and the snapshots that a server uses.

    Args:
        folder: it gets a folder that only this user can enter.
        limit: how many bytes the files of stores may take. The least recently used snapshots are
            removed for new ones, but none that a server uses.
        arrange: `arrange(files, target)` builds a repository in `target`; it returns False if
            `files` is one already. None: they are a repository.

    Attributes:
        path: the model repository to serve.
    """

    def __init__(
        self, folder: Path, limit: int, arrange: Callable[[Path, Path], bool] | None = None
    ) -> None:
        self._arrange = arrange
        self._folder = folder / f"user-{os.geteuid()}"
        self._snapshots = self._folder / "snapshots"
        try:
            risk = private_files.create(self._folder)
            if self._folder.is_symlink():
                risk = "it is a link"
            if risk:
                raise PermissionError(risk)
            for name in ("blobs", "snapshots", "servers", "urls"):
                (self._folder / name).mkdir(mode=0o700, exist_ok=True)
            # A part from before the machine started may have lost contents, but not their length.
            boot = _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else "0"
            suffix = f".{boot}.part"
            with private_files.locked(self._folder / LOCK):
                self._own = Path(tempfile.mkdtemp(dir=self._folder / "servers"))
                # Raises if the disk has no hard links.
                hard_link(self._folder / LOCK, self._own / "link")
                # Held until this process ends: it marks the snapshots as used.
                self._lock = (self._own / LOCK).open("wb")
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                self._space = CacheSpace(self._folder, self._own, limit, suffix)
                self._space.used()  # removes the folders of servers that were killed
        except OSError as error:
            raise self._error(error) from None
        self._blobs = Blobs(self._folder / "blobs", suffix, self._locked)
        self.path = self._own / "models"

    def close(self) -> None:
        """Release the snapshots. May be called twice."""
        with contextlib.suppress(ServerError), self._locked():
            self._lock.close()
            shutil.rmtree(self._own, ignore_errors=True)

    def fetch(
        self, store: Store, progress: Progress, on_wait: Callable[[], None] = lambda: None
    ) -> Snapshot:
        """Fetch what is missing of a repository, and return its snapshot, which is kept for `use`.

        Args:
            store: the store.
            progress: called when bytes are received.
            on_wait: called before this server waits for another one that fetches the same file.

        Raises:
            StoreError: the store fails, or the repository does not fit into the cache.
            ServerError: the cache cannot be used.
        """
        transfer = Transfer(store, progress, on_wait)
        for _ in range(_ATTEMPTS):
            files = store.files()
            snapshot = Snapshot(self._name(store, files), store.identity, frozenset(files))
            try:
                with tempfile.TemporaryDirectory(
                    dir=self._own, ignore_cleanup_errors=True
                ) as scratch:
                    if self._fetch(transfer, files, snapshot.name, Path(scratch)):
                        return snapshot
            except OSError as error:
                raise self._error(error) from None
        raise StoreError(
            f"{store.url} changes while it is read; expected it to stay the same for as long as"
            " that takes.",
            temporary=True,
        )

    def last(self, store: Store) -> Snapshot | None:
        """Return the snapshot of a URL that was used last, or None. It is kept for `use`."""
        with self._locked():
            name = self._last_name(store.identity)
            if not name:
                return None
            self._keep(name)
            return Snapshot(name, store.identity)

    def use(self, snapshot: Snapshot) -> None:
        """Serve a snapshot, which is the last one of its store from now on.

        Raises:
            ServerError: the cache cannot be used.
        """
        with self._locked():
            self._point(self.path, snapshot.name)
            if self._last_name(snapshot.store) != snapshot.name:
                replace_file(self._folder / "urls" / snapshot.store, snapshot.name.encode())

    # --- in the order of a fetch ----------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with private_files.locked(self._folder / LOCK):
                if self._lock.closed:
                    # A thread that still fetches: what it linked before was removed.
                    raise OSError("it is closed")
                yield
        except OSError as error:
            raise self._error(error) from None

    def _fetch(self, transfer: Transfer, files: Files, name: str, scratch: Path) -> bool:
        """Make and keep a snapshot; return whether the store's files stayed the same meanwhile."""
        store, folder, final = transfer.store, scratch / "files", self._snapshots / name
        with self._locked():
            # Release the snapshot that was fetched but never served.
            (self._own / "next").unlink(missing_ok=True)
            if final.is_dir():
                os.utime(final)
                self._keep(name)
                return True
            # Link cached files, so that no other server removes them, and make room for the rest.
            sizes = {}
            for path, file in files.items():
                if not file.key:
                    (folder / path).mkdir(mode=0o700, parents=True)
                elif not self._blobs.link(file, folder / path):
                    sizes[file.key] = file.size
            if sizes:
                self._space.make_room(store.url, sizes, self._last_name(store.identity))
        missing = {path: file for path, file in files.items() if not (folder / path).exists()}
        by_key = {file.key: file for file in missing.values()}
        transfer.begin(sum(file.size for file in by_key.values()))
        for file in by_key.values():
            if not self._blobs.fetch(transfer, file, scratch / file.key):
                return False
        if missing and self._name(store, store.files()) != name:
            return False
        for path, file in missing.items():
            hard_link(scratch / file.key, folder / path)
        self._add(name, folder, scratch / "arranged")
        return True

    def _add(self, name: str, folder: Path, arranged: Path) -> None:
        """Make a snapshot of complete files, and keep it."""
        if self._arrange is not None and self._arrange(folder, arranged):
            folder = arranged
            os.sync()  # of files that were made, not fetched
        with self._locked():
            # Code that the models compiled stays with them.
            for old in self.path.glob(f"*/{COMPILED}/*.bundle"):
                relative = old.relative_to(self.path)
                if (folder / relative.parts[0]).is_dir():
                    hard_link(old, folder / relative)
            if not (self._snapshots / name).is_dir():  # another server has not made it meanwhile
                folder.rename(self._snapshots / name)
            self._keep(name)

    def _keep(self, name: str) -> None:
        """Protect a snapshot from removal, until another one is kept."""
        self._point(self._own / "next", name)

    def _point(self, link: Path, name: str) -> None:
        """Make a link to a snapshot, or replace it atomically."""
        target = Path("..", "..", "snapshots", name)
        if link.is_symlink() and link.readlink() == target:
            return
        scratch = link.with_name(f".{link.name}")
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(target)
        scratch.replace(link)

    def _name(self, store: Store, files: Files) -> str:
        """Return the name of the snapshot of these files: the same for the same contents."""
        listing = sorted(
            f"{path}\0{file.key}" for path, file in files.items() if not _is_compiled(path)
        )
        if self._arrange is not None:  # the name of a model folder is that of its URL
            listing.append(store.url)
        return hashlib.sha256("\0".join(listing).encode()).hexdigest()[:40]

    def _last_name(self, store: str) -> str:
        file = self._folder / "urls" / store
        name = file.read_text(encoding="utf-8") if file.is_file() else ""
        return name if name and (self._snapshots / name).is_dir() else ""

    def _error(self, error: OSError) -> ServerError:
        if error.errno == errno.ENOSPC:
            return StoreError(
                f"the disk of {self._folder} is full. Free some space, or name another folder with"
                " --cache.",
                temporary=True,
            )
        other = " Name another folder on a local disk with --cache."
        cure = "" if error.errno in _PASSING else other
        return ServerError(
            f"the cache {self._folder} cannot be used: {error.strerror or error}.{cure}"
        )


def _is_compiled(path: PurePosixPath) -> bool:
    return path.parts[1:-1] == (COMPILED,) and path.suffix == ".bundle"
