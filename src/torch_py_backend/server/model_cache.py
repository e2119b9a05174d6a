"""Model repositories from an object store on the local disk, for all servers of this user.

    blobs/<key>             the contents of one file; `<key>.part` is not complete
    snapshots/<id>/         the files of a repository, as hard links to blobs
    servers/<name>/models   what a server serves: a link to a snapshot
    urls/<hash>             the name of the last snapshot of an URL

A snapshot appears when it is complete, and its files never change, except those that models add
(`compile_cache`). A server changes to another one by replacing its link. Files that several
snapshots share are fetched once and, as hard links, mapped into memory once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import psutil

from torch_py_backend.errors import ServerError, summarize
from torch_py_backend.processes import private_files
from torch_py_backend.server.object_store import RemoteFile, Store, StoreError

COMPILED = "compile_cache"
_LOCK = "lock"
# How often a repository is listed again that changes while it is fetched.
_LISTINGS = 3
_GIGABYTE = 1e9
_CLOSE_S = 2.0

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
        limit: how many bytes the files may take. The least recently used snapshots are removed for
            new ones, but none that a server uses.
        on_wait: called if another server is fetching, before this one waits for it.
        arrange: makes a model repository in its second argument from the files in its first one,
            and returns whether it did; None: the files are a repository.

    Attributes:
        path: the model repository to serve.
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        *,
        on_wait: Callable[[], None] = lambda: None,
        arrange: Callable[[Path, Path], bool] | None = None,
    ) -> None:
        self._limit, self._on_wait, self._arrange = limit, on_wait, arrange
        self._folder = folder / f"user-{os.geteuid()}"
        try:
            risk = private_files.create(self._folder)
            for name in ("blobs", "snapshots", "servers", "urls"):
                (self._folder / name).mkdir(mode=0o700, exist_ok=True)
            if risk:
                raise PermissionError(risk)
            # Others remove a folder that is not locked, if its name has no dot.
            folder = Path(tempfile.mkdtemp(dir=self._folder / "servers", prefix="."))
            # Held until this process ends: it marks the snapshots as used.
            self._lock = (folder / _LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._own = folder.rename(folder.with_name(folder.name[1:]))
        except OSError as error:
            raise self._error(error) from None
        self.path = self._own / "models"

    def close(self) -> None:
        """Release the snapshots. May be called twice."""
        self._lock.close()
        shutil.rmtree(self._own, ignore_errors=True)

    def fetch(self, store: Store, progress: Progress) -> Snapshot:
        """Fetch what is missing of a repository, and return its snapshot, which is kept for `use`.

        Raises:
            StoreError: the store fails, or the repository does not fit into the cache.
        """
        files = store.files()
        for _ in range(_LISTINGS):
            name = _name(files)
            with self._fetching():
                missing = self._missing(files)
                if missing:
                    self._make_room(store, missing, files)
                    error = self._fetch_all(store, missing, progress)
                    again = store.files()
                    self._accept(missing, again)
                    if _name(again) != name:
                        files = again
                        continue
                    if error is not None:
                        raise error
                self._build(name, files)
                self._keep(name)
                _write(self._url_file(store), name)
            return Snapshot(name, frozenset(files))
        raise StoreError(
            f"{store.url} changes while it is read; expected it to stay the same for as long as"
            " that takes.",
            temporary=True,
        )

    def last(self, store: Store) -> Snapshot | None:
        """Return the last snapshot of an URL, which is kept for `use`; None: there is none."""
        with contextlib.suppress(FileNotFoundError), self._fetching():
            name = self._url_file(store).read_text(encoding="utf-8")
            if (self._folder / "snapshots" / name).is_dir():
                self._keep(name)
                return Snapshot(name)
        return None

    def use(self, snapshot: Snapshot) -> None:
        """Serve a snapshot."""
        _link(Path("..", "..", "snapshots", snapshot.name), self.path)
        (self._own / "next").unlink(missing_ok=True)

    # --- in the order of a fetch ----------------------------------------------------------------

    @contextlib.contextmanager
    def _fetching(self) -> Iterator[None]:
        """Hold the lock of the cache; with it, snapshots and blobs are added and removed."""
        try:
            with private_files.locked(self._folder / _LOCK, self._on_wait):
                yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._error(error) from None

    def _missing(self, files: Files) -> Mapping[str, RemoteFile]:
        return {file.key: file for file in files.values() if not self._blob(file.key).is_file()}

    def _make_room(self, store: Store, missing: Mapping[str, RemoteFile], files: Files) -> None:
        """Remove unused snapshots until the missing files fit."""
        needed = sum(file.size for file in missing.values())
        for part in (self._folder / "blobs").glob("*.part"):
            status = part.stat()
            # A machine that lost its power may have the length of a file, but not its contents.
            if part.stem in missing and status.st_mtime > psutil.boot_time():
                needed -= status.st_size
            else:
                part.unlink()
        kept = {file.key for file in files.values()}
        snapshots = iter(self._unused())
        while True:
            used = self._collect(kept)
            free = shutil.disk_usage(self._folder).free
            if used + needed <= self._limit and needed < free:
                return
            unused = next(snapshots, None)
            if unused is None:
                break
            # Renamed first: a snapshot is always complete.
            gone = unused.rename(unused.with_name(f".{unused.name}"))
            shutil.rmtree(gone, ignore_errors=True)
        limited = used + needed > self._limit
        raise StoreError(
            f"{store.url} needs {needed / _GIGABYTE:.3g} GB more in {self._folder}, where"
            f" {used / _GIGABYTE:.3g} GB are in use; expected at most"
            f" {self._limit / _GIGABYTE:.3g} GB (--cache-size)."
            if limited
            else f"{store.url} needs {needed / _GIGABYTE:.3g} GB more in {self._folder}, and its"
            f" disk has {free / _GIGABYTE:.3g} GB left.",
            temporary=True,
        )

    def _collect(self, kept: set[str]) -> int:
        """Remove the blobs of no snapshot; return the bytes that the others take."""
        used = 0
        for blob in (self._folder / "blobs").iterdir():
            status = blob.stat()
            if status.st_nlink == 1 and blob.stem not in kept:
                blob.unlink()
            else:
                used += status.st_size
        return used

    def _unused(self) -> list[Path]:
        """Return the snapshots that no server uses, least recently used first."""
        used = set()
        for server in (self._folder / "servers").iterdir():
            if server.name.startswith("."):
                continue  # it is being made
            if server == self._own or _is_locked(server / _LOCK):
                used |= {link.resolve() for link in server.iterdir() if link.is_symlink()}
            else:  # its process was killed
                shutil.rmtree(server, ignore_errors=True)
        snapshots = (self._folder / "snapshots").iterdir()
        return sorted(
            (path for path in snapshots if path.resolve() not in used),
            key=lambda path: path.stat().st_mtime,
        )

    def _fetch_all(
        self, store: Store, missing: Mapping[str, RemoteFile], progress: Progress
    ) -> StoreError | None:
        """Fetch files as parts; return the error of the store that ended it."""
        try:
            self._fetch_parts(store, missing, progress)
        except StoreError as error:
            return error
        return None

    def _fetch_parts(
        self, store: Store, missing: Mapping[str, RemoteFile], progress: Progress
    ) -> None:
        total = sum(file.size for file in missing.values())
        done = 0
        progress(done, total)
        for file in missing.values():
            part = self._blob(f"{file.key}.part")
            with part.open("ab") as output:
                # An incomplete file is continued where it ends.
                done += output.tell()
                progress(done, total)
                for piece in store.read(file, output.tell()):
                    output.write(piece)
                    done += len(piece)
                    progress(done, total)
                output.flush()
                os.fsync(output.fileno())
            self._check(store, file, part)

    def _accept(self, missing: Mapping[str, RemoteFile], files: Files) -> None:
        """Make blobs of complete parts, if their files did not change while they were read."""
        unchanged = {file.key for file in files.values()}
        for key, file in missing.items():
            part = self._blob(f"{key}.part")
            if key not in unchanged:
                part.unlink(missing_ok=True)
            elif part.is_file() and part.stat().st_size == file.size:
                part.chmod(0o400)
                part.rename(self._blob(key))

    @staticmethod
    def _check(store: Store, file: RemoteFile, part: Path) -> None:
        size = part.stat().st_size
        if size != file.size:
            part.unlink()
            raise StoreError(
                f"{store.url}: {file.path} has {size} bytes; expected {file.size}.", temporary=True
            )
        if file.digest is not None:
            name, expected = file.digest
            digest = hashlib.new(name, usedforsecurity=False)
            with part.open("rb") as content:
                while piece := content.read(1 << 20):
                    digest.update(piece)
            if digest.hexdigest() != expected:
                part.unlink()
                raise StoreError(
                    f"{store.url}: {file.path} has the {name} {digest.hexdigest()}; expected"
                    f" {expected}.",
                    temporary=True,
                )

    def _build(self, name: str, files: Files) -> None:
        """Make the snapshot, with the compiled code of the one that is served."""
        final = self._folder / "snapshots" / name
        if final.is_dir():
            os.utime(final)
            files = {path: file for path, file in files.items() if COMPILED in path.parts}
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=".") as scratch:
            folder = final if final.is_dir() else Path(scratch, "files")
            for path, file in files.items():
                _hard_link(self._blob(file.key), folder / path)
            if folder == final:
                return
            made = Path(scratch, "made")
            if self._arrange is not None and self._arrange(folder, made):
                folder = made
            for old in self.path.glob(f"*/{COMPILED}/*.bundle"):
                if (folder / old.relative_to(self.path).parts[0]).is_dir():
                    _hard_link(old, folder / old.relative_to(self.path))
            folder.rename(final)

    def _keep(self, name: str) -> None:
        _link(Path("..", "..", "snapshots", name), self._own / "next")

    def _blob(self, key: str) -> Path:
        return self._folder / "blobs" / key

    def _url_file(self, store: Store) -> Path:
        return self._folder / "urls" / hashlib.sha256(store.url.encode()).hexdigest()[:40]

    def _error(self, error: OSError) -> ServerError:
        if error.errno == errno.ENOSPC:
            return StoreError(f"the disk of {self._folder} is full.", temporary=True)
        return ServerError(
            f"the cache {self._folder} cannot be used: {summarize(error)}. Name another folder on a"
            " local disk with --cache."
        )


class Mirror:
    """Keeps a server's repository like one in a store.

    A thread polls the store. What it has fetched is served by `step`, in the thread that calls it,
    between two loads: a load reads the files of one snapshot.

    Args:
        seconds: the time between two polls; 0: the store is read once.
        uploads: whether code that models have compiled is written to the store.
        report: called with each problem, and with each change, by `step`.
    """

    def __init__(
        self,
        store: Store,
        cache: ModelCache,
        report: Callable[[str], None],
        *,
        seconds: float,
        uploads: bool,
    ) -> None:
        self._store, self._cache, self._report = store, cache, report
        self._seconds, self._uploads = seconds, uploads
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._messages: list[str] = []
        self._next: Snapshot | None = None
        self._current = Snapshot("")
        self._problem = ""

    def open(self, progress: Progress) -> None:
        """Fetch the repository; if the store does not answer, use what was fetched last.

        Raises:
            StoreError: the store refuses, or nothing was fetched before.
        """
        try:
            self._current = self._cache.fetch(self._store, progress)
        except StoreError as error:
            last = self._cache.last(self._store) if error.temporary else None
            if last is None:
                raise
            self._current = last
            self._report(f"{error} What was fetched last is served.")
        self._cache.use(self._current)
        if self._seconds:
            self._thread = threading.Thread(target=self._run, name="polling", daemon=True)
            self._thread.start()

    @property
    def path(self) -> Path:
        """The model repository to serve."""
        return self._cache.path

    def step(self, is_loading: Callable[[], bool]) -> None:
        """Report what polling has found; serve a new snapshot unless a model is being loaded."""
        messages, self._messages = self._messages, []
        for message in messages:
            self._report(message)
        if self._next is not None and not is_loading():
            self._cache.use(self._next)
            self._current, self._next = self._next, None
            self._report(f"{self._store.url} has changed: its files are here.")

    def close(self) -> None:
        """Stop polling; a store that does not answer is not waited for."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                if self._next is None:
                    snapshot = self._cache.fetch(self._store, lambda *_: None)
                    if snapshot.name != self._current.name:
                        self._next = snapshot
                    elif self._uploads:
                        self._upload(snapshot)
                self._problem = ""
            except Exception as error:  # polling goes on
                text = str(error) if isinstance(error, ServerError) else f"{summarize(error)}."
                if text != self._problem:
                    self._messages.append(f"{text} The models serve on.")
                self._problem = text

    def _upload(self, snapshot: Snapshot) -> None:
        repository = self._cache.path
        for path in repository.glob(f"*/{COMPILED}/*.bundle"):
            relative = PurePosixPath(path.relative_to(repository))
            if relative not in snapshot.paths:
                self._store.write(path, relative)
                self._messages.append(f"{relative} was written to {self._store.url}.")


def _name(files: Files) -> str:
    """Return the name of the snapshot of these files: the same for the same contents."""
    listing = sorted(
        f"{path}\0{file.key}" for path, file in files.items() if COMPILED not in path.parts
    )
    return hashlib.sha256("\0".join(listing).encode()).hexdigest()[:40]


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _hard_link(source: Path, target: Path) -> None:
    """Link a file, and keep the one that is there."""
    # Code is loaded from `compile_cache` only if no other user can write there.
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.link(source, target)


def _link(target: Path, link: Path) -> None:
    """Replace a symbolic link at once."""
    scratch = link.with_name(f".{link.name}")
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(target)
    scratch.replace(link)


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
