"""Model repositories from an object store on the local disk, for all servers of this user.

    blobs/<key>             the contents of one file; `<key>.<boot>.part` is not complete
    snapshots/<name>/       the files of a repository, as hard links to blobs
    servers/<name>/models   what a server serves: a link to a snapshot
    urls/<hash>             the name of the last snapshot of a URL

A snapshot appears when it is complete, and its files never change, except those that models add
(`compile_cache`). A server changes to another one by replacing its link. Files that several
snapshots share are fetched once and, as hard links, mapped into memory once.

The lock of the cache is held while links are made and files removed, never while a store is read.
Of several servers that need the same file, one holds the lock of its part.
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
from typing import IO, TypeAlias

from torch_py_backend.errors import ServerError
from torch_py_backend.processes import private_files
from torch_py_backend.server.cache_space import LOCK, CacheSpace
from torch_py_backend.server.object_store import RemoteFile, Store, StoreError

COMPILED = "compile_cache"
# How often a repository is read again that changes meanwhile.
_ATTEMPTS = 3
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Files: TypeAlias = "Mapping[PurePosixPath, RemoteFile]"
# Called with the bytes that have come, and those that come in all.
Progress: TypeAlias = "Callable[[int, int], None]"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of a repository at one time.

    Attributes:
        name: the same for the same contents.
        paths: the files in the store; empty if it did not answer.
    """

    name: str
    paths: frozenset[PurePosixPath] = frozenset()


class ModelCache:
    """The files of repositories, and the snapshots that a server uses.

    Args:
        folder: it gets a folder that only this user can enter.
        limit: how many bytes the files of stores may take. The least recently used snapshots are
            removed for new ones, but none that a server uses.
        arrange: makes a model repository in its second argument from the files in its first one,
            and returns whether it did; None: the files are a repository.

    Attributes:
        path: the model repository to serve.
    """

    def __init__(
        self, folder: Path, limit: int, arrange: Callable[[Path, Path], bool] | None = None
    ) -> None:
        self._arrange = arrange
        self._folder = folder / f"user-{os.geteuid()}"
        self._blobs = self._folder / "blobs"
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
            self._suffix = f".{boot}.part"
            with private_files.locked(self._folder / LOCK):
                self._own = Path(tempfile.mkdtemp(dir=self._folder / "servers"))
                # Held until this process ends: it marks the snapshots as used.
                self._lock = (self._own / LOCK).open("wb")
                fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise self._error(error) from None
        self._space = CacheSpace(self._folder, self._own, limit, self._suffix)
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
            progress: called when bytes come.
            on_wait: called before this server waits for another one that fetches the same file.

        Raises:
            StoreError: the store fails, or the repository does not fit into the cache.
            ServerError: the cache cannot be used.
        """
        for _ in range(_ATTEMPTS):
            files = store.files()
            snapshot = Snapshot(_name(files), frozenset(files))
            try:
                if self._fetch(store, files, snapshot.name, progress, on_wait):
                    return snapshot
            except OSError as error:
                raise self._error(error) from None
            finally:
                self._space.release()
                shutil.rmtree(self._own / "new", ignore_errors=True)
        raise StoreError(
            f"{store.url} changes while it is read; expected it to stay the same for as long as"
            " that takes.",
            temporary=True,
        )

    def last(self, store: Store) -> Snapshot | None:
        """Return the snapshot of a URL that was fetched last, or None. It is kept for `use`."""
        with self._locked():
            name = self._last_name(store)
            if not name:
                return None
            self._keep(store, name)
            return Snapshot(name)

    def use(self, snapshot: Snapshot) -> None:
        """Serve a snapshot.

        Raises:
            OSError: the link cannot be replaced.
        """
        _link(Path("..", "..", "snapshots", snapshot.name), self.path)

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

    def _fetch(
        self,
        store: Store,
        files: Files,
        name: str,
        progress: Progress,
        on_wait: Callable[[], None],
    ) -> bool:
        """Make and keep a snapshot; return whether the store's files stayed the same meanwhile."""
        scratch = self._own / "new"
        files, is_there = self._link_blobs(store, files, name, scratch / "files")
        missing = {
            path: file for path, file in files.items() if not (scratch / "files" / path).exists()
        }
        by_key = {file.key: file for file in missing.values()}
        count = _Count(progress, sum(file.size for file in by_key.values()))
        for file in by_key.values():
            if not self._fetch_file(store, file, scratch / file.key, count, on_wait):
                return False
        if missing and _name(store.files()) != name:
            return False
        for path, file in missing.items():
            _hard_link(scratch / file.key, scratch / "files" / path)
        return not files or self._add(store, files, name, scratch, is_there=is_there)

    def _link_blobs(
        self, store: Store, files: Files, name: str, folder: Path
    ) -> tuple[Files, bool]:
        """Link cached files, so that no other server removes them, and make room for the rest.

        Returns:
            The files that the snapshot lacks, and whether it is there.
        """
        final = self._snapshots / name
        with self._locked():
            is_there = final.is_dir()
            if is_there:
                os.utime(final)
                self._keep(store, name)
                files = {} if self._arrange else _missing_compiled(files, final)
            for path, file in files.items():
                if self._blob(file).is_file():
                    _hard_link(self._blob(file), folder / path)
            missing = [file for path, file in files.items() if not (folder / path).exists()]
            if missing:
                sizes = {file.key: file.size for file in missing}
                self._space.reserve(store.url, sizes, self._last_name(store))
        return files, is_there

    def _add(self, store: Store, files: Files, name: str, scratch: Path, *, is_there: bool) -> bool:
        """Add a snapshot, or compiled code to the one that is there; return whether that is."""
        final, made = self._snapshots / name, scratch / "made"
        if is_there or self._arrange is None or not self._arrange(scratch / "files", made):
            made = scratch / "files"
        with self._locked():
            for old in self.path.glob(f"*/{COMPILED}/*.bundle"):
                relative = old.relative_to(self.path)
                if (made / relative.parts[0]).is_dir():
                    _hard_link(old, made / relative)
            if final.is_dir():
                for path in filter(_is_compiled, files):
                    _hard_link(made / path, final / path)
            elif is_there:
                return False  # someone has removed it
            else:
                made.rename(final)
            self._keep(store, name)
        return True

    def _fetch_file(
        self,
        store: Store,
        file: RemoteFile,
        link: Path,
        count: _Count,
        on_wait: Callable[[], None],
    ) -> bool:
        """Fetch a file, and link it; return whether it stayed the same meanwhile."""
        part, blob = self._blobs / f"{file.key}{self._suffix}", self._blob(file)
        while True:
            with part.open("ab") as output:
                _flock(output, on_wait)
                output.seek(0, os.SEEK_END)  # another server may have added to it meanwhile
                with self._locked():
                    is_part = _is_at(output, part)
                    if blob.is_file():  # another server has fetched it
                        _hard_link(blob, link)
                        count.add(file.size)
                        if is_part:
                            part.unlink()
                        return True
                if not is_part:  # another server has removed it
                    continue
                count.add(output.tell())
                try:
                    for piece in store.read(file, output.tell()):
                        output.write(piece)
                        count.add(len(piece))
                    output.flush()
                    os.fsync(output.fileno())
                except OSError:  # what has reached the disk is not known
                    part.unlink()
                    raise
                except StoreError:
                    if store.is_unchanged(file):
                        raise
                    part.unlink()
                    return False
                if (reason := self._difference(store, file, part)) is not None:
                    part.unlink()
                    if reason:
                        raise StoreError(reason, temporary=True)
                    return False
                with self._locked():
                    part.rename(blob)
                    blob.chmod(0o400)  # a part that is not writable could never be continued
                    _hard_link(blob, link)
                return True

    @staticmethod
    def _difference(store: Store, file: RemoteFile, part: Path) -> str | None:
        """Return how a part differs from what was listed; None: not; empty: the file changed."""
        size = part.stat().st_size
        if size != file.size:
            return f"{store.url}: {file.path} has {size} bytes; expected {file.size}."
        if file.digest is None:
            # S3 has sent contents with this etag only.
            return None if file.etag or store.is_unchanged(file) else ""
        name, expected = file.digest
        digest = hashlib.new(name, usedforsecurity=False)
        with part.open("rb") as content:
            while piece := content.read(1 << 20):
                digest.update(piece)
        if digest.hexdigest() == expected:
            return None
        if not store.is_unchanged(file):
            return ""
        return f"{store.url}: {file.path} has the {name} {digest.hexdigest()}; expected {expected}."

    def _keep(self, store: Store, name: str) -> None:
        """Mark a snapshot as used, until another one is, and as the last one of its URL."""
        _link(Path("..", "..", "snapshots", name), self._own / "next")
        if self._last_name(store) != name:
            _write(self._url_file(store), name)

    def _blob(self, file: RemoteFile) -> Path:
        return self._blobs / file.key

    def _url_file(self, store: Store) -> Path:
        return self._folder / "urls" / store.identity

    def _last_name(self, store: Store) -> str:
        file = self._url_file(store)
        name = file.read_text(encoding="utf-8") if file.is_file() else ""
        return name if name and (self._snapshots / name).is_dir() else ""

    def _error(self, error: OSError) -> ServerError:
        if error.errno == errno.ENOSPC:
            return StoreError(f"the disk of {self._folder} is full.", temporary=True)
        return ServerError(
            f"the cache {self._folder} cannot be used: {error.strerror or error}. Name another"
            " folder on a local disk with --cache."
        )


class _Count:
    """Adds up the bytes that came."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        if total:
            progress(0, total)

    def add(self, size: int) -> None:
        self._done += size
        self._progress(self._done, self._total)


def _is_compiled(path: PurePosixPath) -> bool:
    return path.parts[1:-1] == (COMPILED,) and path.suffix == ".bundle"


def _missing_compiled(files: Files, snapshot: Path) -> Files:
    return {
        path: file
        for path, file in files.items()
        if _is_compiled(path) and not (snapshot / path).exists()
    }


def _name(files: Files) -> str:
    """Return the name of the snapshot of these files: the same for the same contents."""
    listing = sorted(
        f"{path}\0{file.key}" for path, file in files.items() if not _is_compiled(path)
    )
    return hashlib.sha256("\0".join(listing).encode()).hexdigest()[:40]


def _flock(file: IO[bytes], on_wait: Callable[[], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether an open file is still the one of this path."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    return False


def _hard_link(source: Path, target: Path) -> None:
    """Link a file, and keep the one that is there."""
    # Code is loaded from `compile_cache` only if no other user can write there.
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.link(source, target)


def _link(target: Path, link: Path) -> None:
    """Replace a symbolic link at once."""
    if link.is_symlink() and link.readlink() == target:
        return
    scratch = link.with_name(f".{link.name}")
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(target)
    scratch.replace(link)


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
