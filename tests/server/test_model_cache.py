"""Repositories of a store on the local disk: fetched once, whole, and kept within a limit."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import stores
from stores import Faulty

from torch_py_backend.errors import ServerError
from torch_py_backend.server import blobs, cache_space, object_store
from torch_py_backend.server.model_cache import ModelCache
from torch_py_backend.server.object_store import Store
from torch_py_backend.server.store_errors import StoreError

_ALL = sum(map(len, stores.FILES.values()))


def _blobs(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("cache/user-*/blobs/*"))


def test_fetched_once(store: type[Faulty], opened: Callable[..., ModelCache]) -> None:
    """A second server has the same files, of the same inodes, and reads nothing."""
    caches = opened(), opened()
    told: list[tuple[int, int]] = []
    for cache in caches:
        cache.use(cache.fetch(Store(stores.URL), lambda done, total: told.append((done, total))))
        assert stores.files_in(cache.path) == stores.FILES
    assert store.bytes_read == _ALL
    assert told[-1] == (_ALL, _ALL)
    assert len({(cache.path / "a/1/model.pt").stat().st_ino for cache in caches}) == 1
    # No writer of the repository can change what others serve.
    assert (caches[0].path / "a/1/model.pt").stat().st_mode & 0o222 == 0


def test_versions_that_share_files(s3: stores.S3, opened: Callable[..., ModelCache]) -> None:
    """Files of another folder of the bucket are not fetched again if their contents are equal."""
    s3.put("bucket/monday", stores.FILES)
    s3.put("bucket/tuesday", {**stores.FILES, "a/config.pbtxt": b"other"})
    cache = opened()
    fetched: list[int] = []
    for day in ("monday", "tuesday"):
        cache.use(cache.fetch(Store(f"s3://bucket/{day}"), lambda _, total: fetched.append(total)))
    assert fetched[-1] == len(b"other")
    assert stores.files_in(cache.path) == {**stores.FILES, "a/config.pbtxt": b"other"}


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_stores_of_fsspec(protocol: str, opened: Callable[..., ModelCache], tmp_path: Path) -> None:
    """A folder of this machine, and memory: any store that reports times of change."""
    root = tmp_path / "store"
    files: Any = fsspec.filesystem(protocol, auto_mkdir=True)
    for name, content in stores.FILES.items():
        files.pipe_file(f"{root}/{name}", content)
    cache = opened()
    cache.use(cache.fetch(Store(f"{protocol}://{root}"), stores.ignore))
    assert stores.files_in(cache.path) == stores.FILES


def test_four_at_once(store: type[Faulty], opened: Callable[..., ModelCache]) -> None:
    waits: list[None] = []

    def fetch(_: int) -> dict[str, bytes]:
        cache = opened()
        progress = lambda *_: time.sleep(0.05)  # noqa: E731
        cache.use(cache.fetch(Store(stores.URL), progress, lambda: waits.append(None)))
        return stores.files_in(cache.path)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert list(pool.map(fetch, range(4))) == [stores.FILES] * 4
    assert store.bytes_read == _ALL
    assert waits


def test_resumed(
    store: type[Faulty],
    opened: Callable[..., ModelCache],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """What came before an interruption is not fetched again."""
    monkeypatch.setattr(object_store, "_PIECE", 1000)
    monkeypatch.setattr(object_store, "_PIECES", 2)
    store.reading_errors = [None, None, None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        opened().fetch(Store(stores.URL), stores.ignore)
    read = store.bytes_read
    assert 0 < read < _ALL
    assert any(name.endswith(".part") for name in _blobs(tmp_path))
    cache = opened()
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(cache.path) == stores.FILES
    assert store.bytes_read == _ALL
    assert not any(name.endswith(".part") for name in _blobs(tmp_path))


def test_a_part_from_before_the_machine_started_is_not_continued(
    store: type[Faulty], opened: Callable[..., ModelCache], tmp_path: Path
) -> None:
    """It may have the length of what was written, but not the contents."""
    store.reading_errors = [None, *[OSError("gone") for _ in range(5)]]
    with pytest.raises(StoreError, match="gone"):
        opened().fetch(Store(stores.URL), stores.ignore)
    (part,) = (tmp_path / "cache").rglob("*.part")
    part.write_bytes(bytes(100))
    part.rename(part.with_name(f"{part.name.partition('.')[0]}.another-boot.part"))
    cache = opened()
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(cache.path) == stores.FILES
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_wrong_digest(
    store: type[Faulty], opened: Callable[..., ModelCache], tmp_path: Path
) -> None:
    """The file is not kept; the right one is fetched the next time."""
    right = hashlib.sha256(stores.WEIGHTS).hexdigest()
    store.facts["a/1/model.pt"] = {"lfs": {"sha256": right}}
    store.files["a/1/model.pt"] = bytes(len(stores.WEIGHTS))
    with pytest.raises(StoreError, match=f"a/1/model.pt has another sha256 .*; expected {right}"):
        opened().fetch(Store(stores.URL), stores.ignore)
    assert len(_blobs(tmp_path)) <= 1
    cache = opened()
    for _ in range(2):
        with pytest.raises(StoreError, match="has another sha256"):
            cache.fetch(Store(stores.URL), stores.ignore)
    # A cache that polls reads it once; another one does not know.
    assert store.bytes_read == 2 * len(stores.WEIGHTS) + 1
    store.files["a/1/model.pt"] = stores.WEIGHTS
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(cache.path) == stores.FILES


@pytest.fixture
def change(store: type[Faulty], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces the files of the store after the next pieces were read."""
    replacements: list[dict[str, bytes]] = []
    read = Store.read

    def replace(self: Store, *arguments: Any) -> Iterator[bytes]:
        yield from read(self, *arguments)
        if replacements:
            store.files = replacements.pop(0)

    monkeypatch.setattr(Store, "read", replace)
    return replacements.append


@pytest.mark.parametrize(
    "files",
    [
        {"a/config.pbtxt": b"y", "a/1/model.pt": b"less"},
        {"a/config.pbtxt": b"y", "a/1/model.pt": b"other" + stores.WEIGHTS[5:]},
        {"a/config.pbtxt": b"y"},
        {**stores.FILES, "a/2/model.pt": b"more"},
    ],
    ids=["less", "other", "gone", "more"],
)
def test_changed_while_it_is_read(
    store: type[Faulty],
    opened: Callable[..., ModelCache],
    change: Callable[..., None],
    files: dict[str, bytes],
) -> None:
    """The files of two versions are never served together, nor one that was read in between."""
    cache = opened()
    change(files)
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(cache.path) == files
    store.files = dict(stores.FILES)
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(cache.path) == stores.FILES


def test_a_file_that_changes_between_its_pieces(
    store: type[Faulty], opened: Callable[..., ModelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read of two versions of one file is kept for neither."""
    monkeypatch.setattr(object_store, "_PIECE", 1000)
    monkeypatch.setattr(object_store, "_PIECES", 1)
    pieces = Store._read_pieces
    others = {**stores.FILES, "a/1/model.pt": bytes(len(stores.WEIGHTS))}
    replacements = [others]

    def replace(self: Store, *arguments: Any) -> Any:
        result = pieces(self, *arguments)
        if replacements and arguments[0].path.name == "model.pt":
            store.files = replacements.pop()
        return result

    monkeypatch.setattr(Store, "_read_pieces", replace)
    cache = opened()
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(cache.path) == others
    store.files = dict(stores.FILES)
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(cache.path) == stores.FILES


def test_changed_all_the_time(
    store: type[Faulty], opened: Callable[..., ModelCache], change: Callable[..., None]
) -> None:
    cache = opened()
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    store.files = {"a/config.pbtxt": b"y"}
    for number in range(20):
        change({"a/config.pbtxt": bytes(number)})
    with pytest.raises(StoreError, match="changes while it is read") as raised:
        cache.fetch(Store(stores.URL), stores.ignore)
    assert raised.value.temporary
    assert stores.files_in(cache.path) == stores.FILES


# --- the limit --------------------------------------------------------------------------------


def _version(number: int) -> dict[str, bytes]:
    return {"a/config.pbtxt": b"x", "a/1/model.pt": bytes([number]) * 1000}


def _fetch(cache: ModelCache, store: type[Faulty], number: int) -> None:
    store.files = _version(number)
    cache.use(cache.fetch(Store(f"faulty://models{number}"), stores.ignore))
    time.sleep(0.02)  # the time of use has another value


def _snapshots(tmp_path: Path) -> int:
    return len(list(tmp_path.glob("cache/user-*/snapshots/*")))


def test_least_recently_used_leave(
    store: type[Faulty], opened: Callable[..., ModelCache], tmp_path: Path
) -> None:
    """But none that a live server uses."""
    used = opened(4500)
    _fetch(used, store, 1)
    other = opened(4500)
    for number in (2, 3, 2, 4, 5):
        _fetch(other, store, number)
    # Of 2 and 3, which no server uses any more, 3 was used before 2.
    assert stores.files_in(used.path) == _version(1)
    assert stores.files_in(other.path) == _version(5)
    assert _snapshots(tmp_path) == 4
    store.bytes_read = 0
    _fetch(other, store, 2)
    assert store.bytes_read == 0
    _fetch(other, store, 3)
    assert store.bytes_read > 0


def test_the_last_snapshot_of_a_repository_leaves_after_those_of_others(
    store: type[Faulty], opened: Callable[..., ModelCache], tmp_path: Path
) -> None:
    """It is what is served when the store is down."""
    for number, url in ((1, stores.URL), (2, "faulty://others")):
        store.files = _version(number)
        with contextlib.closing(opened(2500)) as cache:
            cache.use(cache.fetch(Store(url), stores.ignore))
        time.sleep(0.02)  # the time of use has another value
    store.files = _version(3)
    opened(2500).fetch(Store(stores.URL), stores.ignore)
    assert _snapshots(tmp_path) == 2
    store.files, store.bytes_read = _version(1), 0
    opened(2500).fetch(Store(stores.URL), stores.ignore)
    assert store.bytes_read == 0


def test_a_server_that_was_killed_uses_nothing(
    store: type[Faulty], opened: Callable[..., ModelCache], tmp_path: Path
) -> None:
    killed = opened(2500)
    _fetch(killed, store, 1)
    killed._lock.close()  # as the kernel does
    cache = opened(2500)
    assert len(list(tmp_path.glob("cache/user-*/servers/*"))) == 1
    _fetch(cache, store, 2)
    _fetch(cache, store, 3)
    assert stores.files_in(cache.path) == _version(3)
    assert len(list(tmp_path.glob("cache/user-*/servers/*"))) == 1


def test_too_large(store: type[Faulty], opened: Callable[..., ModelCache]) -> None:
    cache = opened(1500)
    _fetch(cache, store, 1)
    with pytest.raises(StoreError, match=r"needs 1.0 kB more .* Raise --cache-size"):
        _fetch(cache, store, 2)
    assert stores.files_in(cache.path) == _version(1)


def test_full_disk(
    store: type[Faulty],
    opened: Callable[..., ModelCache],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Known before, or seen while it is written: nothing incomplete is served."""
    cache = opened()
    _fetch(cache, store, 0)
    _fetch(cache, store, 1)
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
        with pytest.raises(StoreError, match="its disk has 0 bytes left"):
            _fetch(cache, store, 2)
    # That the unused snapshot leaves would not have been enough.
    assert _snapshots(tmp_path) == 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: _raise(OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(StoreError, match=r"the disk of .* is full") as raised:
            _fetch(cache, store, 2)
    assert raised.value.temporary
    # What has reached the disk is not known.
    assert not any(name.endswith(".part") for name in _blobs(tmp_path))
    assert stores.files_in(cache.path) == _version(1)
    _fetch(cache, store, 2)
    assert stores.files_in(cache.path) == _version(2)


def _raise(error: BaseException) -> None:
    raise error


# --- folders ----------------------------------------------------------------------------------


def test_folders_of_others(opened: Callable[..., ModelCache], tmp_path: Path) -> None:
    folder = tmp_path / "cache" / f"user-{os.geteuid()}"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(ServerError, match=r"cannot be used: .*others may write to it"):
        opened()


def test_a_file_in_the_way(opened: Callable[..., ModelCache], tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(ServerError, match=r"cannot be used: .* local disk with --cache"):
        opened()


def test_a_disk_without_hard_links(
    store: type[Faulty], opened: Callable[..., ModelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(os, "link", lambda *_: _raise(error))
    with pytest.raises(ServerError, match=r"Operation not permitted\. Name another folder"):
        opened().fetch(Store(stores.URL), stores.ignore)


def test_equal_models_of_two_urls(store: type[Faulty], opened: Callable[..., ModelCache]) -> None:
    """A model folder has the name of its URL, also if another URL has the same files."""

    def arrange(url: str) -> Callable[[Path, Path], bool]:
        def copy(files: Path, target: Path) -> bool:
            shutil.copytree(files, target / url.rpartition("/")[2])
            return True

        return copy

    for url in ("faulty://models", "faulty://models2"):
        store.files = {"config.json": b"{}"}
        store.facts = {"config.json": {"md5Hash": base64.b64encode(hashlib.md5(b"{}").digest())}}
        cache = opened(arrange=arrange(url))
        cache.use(cache.fetch(Store(url), stores.ignore))
        assert stores.files_in(cache.path) == {f"{url.rpartition('/')[2]}/config.json": b"{}"}


def test_arranged(store: type[Faulty], opened: Callable[..., ModelCache]) -> None:
    """Files that are no repository become one; once."""
    calls: list[Path] = []

    def arrange(files: Path, target: Path) -> bool:
        calls.append(files)
        target.mkdir()
        (files / "a").rename(target / "b")
        return True

    for _ in range(2):
        cache = opened(arrange=arrange)
        cache.use(cache.fetch(Store(stores.URL), stores.ignore))
        assert stores.files_in(cache.path) == {
            "b/config.pbtxt": b"x",
            "b/1/model.pt": stores.WEIGHTS,
        }
    assert len(calls) == 1


# --- interruptions, and several servers ---------------------------------------------------------


def test_a_version_that_is_rolled_back(
    s3: stores.S3, opened: Callable[..., ModelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3's etag of the first version comes back; what was read of the second is not continued."""
    monkeypatch.setattr(object_store, "_PIECE", 1000)
    monkeypatch.setattr(object_store, "_PIECES", 1)
    first, second = bytes(5000), b"x" * 5000
    pieces = Store._read_pieces

    def replace(self: Store, *arguments: Any) -> Any:
        if arguments[1] == [(2000, 3000)]:
            s3.put("bucket/models", {"a/1/model.pt": second})
        if arguments[1] == [(4000, 5000)]:
            raise KeyboardInterrupt
        return pieces(self, *arguments)

    s3.put("bucket/models", {"a/1/model.pt": first})
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_read_pieces", replace)
        with pytest.raises(KeyboardInterrupt):
            opened().fetch(Store("s3://bucket/models"), stores.ignore)
    s3.put("bucket/models", {"a/1/model.pt": first})
    cache = opened()
    cache.use(cache.fetch(Store("s3://bucket/models"), stores.ignore))
    assert stores.files_in(cache.path) == {"a/1/model.pt": first}


def test_a_complete_part_that_was_not_checked(
    store: type[Faulty], opened: Callable[..., ModelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is checked by the server that finds it, also if another file fails before."""
    right = hashlib.sha256(stores.WEIGHTS).hexdigest()
    store.facts["a/1/model.pt"] = {"lfs": {"sha256": right}}
    store.files["a/1/model.pt"] = bytes(len(stores.WEIGHTS))
    with monkeypatch.context() as patch:
        patch.setattr(blobs, "_difference", lambda *_: _raise(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            opened().fetch(Store(stores.URL), stores.ignore)
    store.files["a/1/model.pt"] = stores.WEIGHTS
    with contextlib.suppress(StoreError):
        opened().fetch(Store(stores.URL), stores.ignore)
    cache = opened()
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(cache.path) == stores.FILES


@pytest.mark.parametrize(
    ("facts", "content"),
    [
        ({"lfs": {"sha256": hashlib.sha256(stores.WEIGHTS).hexdigest()}}, b"wrong"),
        ({}, stores.WEIGHTS + b"more"),
    ],
    ids=["contents", "size"],
)
def test_a_part_that_began_wrong(
    store: type[Faulty], opened: Callable[..., ModelCache], facts: dict[str, Any], content: bytes
) -> None:
    """It is read once more, from its start, and no error for the user."""
    store.facts["a/1/model.pt"] = facts
    store.reading_errors = [None, *[OSError("gone") for _ in range(5)]]
    with pytest.raises(StoreError, match="gone"):
        opened().fetch(Store(stores.URL), stores.ignore)
    cache = opened()
    (part,) = cache._folder.glob("blobs/*.part")
    part.write_bytes(content)
    told: list[int] = []
    cache.use(cache.fetch(Store(stores.URL), lambda done, _: told.append(done)))
    assert stores.files_in(cache.path) == stores.FILES
    assert told[-1] == len(stores.WEIGHTS)


def test_a_slow_store_blocks_no_other(
    store: type[Faulty], opened: Callable[..., ModelCache]
) -> None:
    """Another repository is fetched meanwhile; so is another file of the same one."""
    other, slow = opened(), opened()

    def fetch_other(done: int, _total: int) -> None:
        if done:
            store.files = {"b/config.pbtxt": b"b"}
            other.use(other.fetch(Store("faulty://others"), stores.ignore))
            store.files = dict(stores.FILES)

    slow.use(slow.fetch(Store(stores.URL), fetch_other))
    assert stores.files_in(other.path) == {"b/config.pbtxt": b"b"}
    assert stores.files_in(slow.path) == stores.FILES


def test_blobs_of_a_fetch_in_progress_stay(
    store: type[Faulty], opened: Callable[..., ModelCache]
) -> None:
    """Another server that makes room removes neither its files nor its parts."""
    other, slow = opened(4000), opened(4000)
    _fetch(other, store, 1)
    _fetch(other, store, 2)
    rest = iter([lambda: _fetch(other, store, 3)])

    def fetch_other(done: int, _total: int) -> None:
        if done > 100:
            next(rest, lambda: None)()
            store.files = _version(9)

    store.files = _version(9)
    slow.use(slow.fetch(Store("faulty://models9"), fetch_other))
    assert stores.files_in(slow.path) == _version(9)
    assert stores.files_in(other.path) == _version(3)


def test_a_repository_that_never_fits_removes_nothing(
    store: type[Faulty], opened: Callable[..., ModelCache], tmp_path: Path
) -> None:
    cache = opened(3500)
    for number in (1, 2, 3):
        _fetch(cache, store, number)
    store.files = {"a/1/model.pt": bytes(5000)}
    with pytest.raises(StoreError, match=r"needs 5\.0 kB more"):
        cache.fetch(Store(stores.URL), stores.ignore)
    assert _snapshots(tmp_path) == 3


def test_a_part_of_another_repository_stays_if_there_is_room(
    store: type[Faulty], opened: Callable[..., ModelCache], tmp_path: Path
) -> None:
    store.reading_errors = [None, *[OSError("gone") for _ in range(5)]]
    with pytest.raises(StoreError, match="gone"):
        opened().fetch(Store(stores.URL), stores.ignore)
    _fetch(opened(), store, 1)
    assert any(name.endswith(".part") for name in _blobs(tmp_path))


def test_a_server_that_stops_while_another_starts(
    store: type[Faulty], opened: Callable[..., ModelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = opened(), opened()
    is_locked = cache_space._is_locked

    def close_meanwhile(path: Path) -> bool:
        locked = is_locked(path)
        shutil.rmtree(one._own, ignore_errors=True)
        return locked

    monkeypatch.setattr(cache_space, "_is_locked", close_meanwhile)
    _fetch(other, store, 1)
    assert stores.files_in(other.path) == _version(1)


@pytest.mark.parametrize("name", ["", "gone"])
def test_a_damaged_note_of_the_last_snapshot(
    store: type[Faulty], opened: Callable[..., ModelCache], name: str
) -> None:
    cache = opened()
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    (cache._folder / "urls" / Store(stores.URL).identity).write_text(name)
    assert cache.last(Store(stores.URL)) is None


def test_another_store_of_the_same_name(
    store: type[Faulty], opened: Callable[..., ModelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was fetched from a store for tests is not served in place of the real one."""
    cache = opened()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://test:9000")
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert cache.last(Store(stores.URL)) is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://production:9000")
    assert cache.last(Store(stores.URL)) is None


def test_the_cache_s_folder_is_a_link(opened: Callable[..., ModelCache], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"user-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ServerError, match="it is a link"):
        opened()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_compiled_code_of_a_repository(
    store: type[Faulty], opened: Callable[..., ModelCache]
) -> None:
    """A machine fetches bundles with the other files; a new bundle is no new version.

    Other files of that name are.
    """
    store.files["a/compile_cache/b.bundle"] = b"compiled"
    cache = opened()
    first = cache.fetch(Store(stores.URL), stores.ignore)
    cache.use(first)
    assert stores.files_in(cache.path) == store.files
    store.files["a/compile_cache/c.bundle"] = b"compiled by another machine"
    read = store.bytes_read
    assert cache.fetch(Store(stores.URL), stores.ignore).name == first.name
    assert store.bytes_read == read
    store.files["a/1/compile_cache/w.pt"] = b"weights"
    assert cache.fetch(Store(stores.URL), stores.ignore).name != first.name


def test_a_part_is_continued_when_others_make_room_for_it(
    store: type[Faulty], opened: Callable[..., ModelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_PIECE", 1000)
    monkeypatch.setattr(object_store, "_PIECES", 1)
    cache = opened(27_000)
    _fetch(cache, store, 1)
    _fetch(cache, store, 2)
    store.files, store.bytes_read = dict(stores.FILES), 0
    store.reading_errors = [*[None] * 20, *[OSError("gone") for _ in range(5)]]
    with pytest.raises(StoreError, match="gone"):
        cache.fetch(Store(stores.URL), stores.ignore)
    read = store.bytes_read
    _fetch(cache, store, 3)
    store.files, store.bytes_read = dict(stores.FILES), read
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(cache.path) == stores.FILES
    assert store.bytes_read == _ALL


def test_closed_while_a_thread_fetches(
    store: type[Faulty], opened: Callable[..., ModelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the thread has linked is gone: it must not make a snapshot of the rest."""
    cache = opened()
    store.files = {"a/config.pbtxt": b"x"}
    cache.fetch(Store(stores.URL), stores.ignore)
    store.files = dict(stores.FILES)
    with pytest.raises(ServerError, match="it is closed"):
        cache.fetch(Store(stores.URL), lambda done, _: cache.close() if done else None)
    other = opened()
    other.use(other.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(other.path) == stores.FILES
    assert not cache._own.exists()


@pytest.mark.parametrize("kept", [7000, 0])
def test_a_server_that_waited_for_one_that_was_killed(
    store: type[Faulty],
    opened: Callable[..., ModelCache],
    monkeypatch: pytest.MonkeyPatch,
    kept: int,
) -> None:
    """It goes on where that one ended, or from the start if a third one has removed the part."""
    cache = opened()
    flock = blobs._flock
    rest = iter([stores.WEIGHTS[:kept]])

    def killed_meanwhile(file: Any, on_wait: Callable[[], None]) -> None:
        if (content := next(rest, None)) is not None:
            Path(file.name).write_bytes(content)
            if not content:
                Path(file.name).unlink()
        flock(file, on_wait)

    store.files = {"a/1/model.pt": stores.WEIGHTS}
    monkeypatch.setattr(blobs, "_flock", killed_meanwhile)
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(cache.path) == store.files
    assert store.bytes_read == len(stores.WEIGHTS) - kept


def test_a_failed_fetch_uses_nothing(
    store: type[Faulty], opened: Callable[..., ModelCache]
) -> None:
    cache = opened()
    store.reading_errors = [None, *[OSError("gone") for _ in range(5)]]
    with pytest.raises(StoreError, match="gone"):
        cache.fetch(Store(stores.URL), stores.ignore)
    assert not (cache._own / "new").exists()


def test_what_an_earlier_fetch_left(
    store: type[Faulty], opened: Callable[..., ModelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no snapshot, also if it could not be removed: without file descriptors, say."""
    monkeypatch.setattr(tempfile.TemporaryDirectory, "_rmtree", lambda *_, **__: None)
    cache = opened()
    store.reading_errors = [None, *[OSError("gone") for _ in range(5)]]
    with pytest.raises(StoreError, match="gone"):
        cache.fetch(Store(stores.URL), stores.ignore)
    store.files = {**stores.FILES, "a/config.pbtxt": b"y"}
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(cache.path) == store.files


def test_a_version_that_is_never_served_leaves(
    store: type[Faulty], opened: Callable[..., ModelCache]
) -> None:
    """It was fetched by one poll, and replaced before the next one."""
    cache = opened(2500)
    _fetch(cache, store, 1)
    for number in (2, 3):
        store.files = _version(number)
        snapshot = cache.fetch(Store("faulty://models1"), stores.ignore)
    cache.use(snapshot)
    assert stores.files_in(cache.path) == _version(3)


def test_what_was_fetched_and_not_served_is_not_the_last(
    store: type[Faulty], opened: Callable[..., ModelCache]
) -> None:
    """A poll may catch an upload in progress; a start without the store must not serve it."""
    cache = opened()
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    store.files = {"a/config.pbtxt": b"half"}
    cache.fetch(Store(stores.URL), stores.ignore)
    other = opened()
    last = other.last(Store(stores.URL))
    assert last is not None
    other.use(last)
    assert stores.files_in(other.path) == stores.FILES


def test_a_folder_that_cannot_be_removed(
    store: type[Faulty], opened: Callable[..., ModelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model has made it; others are removed all the same."""
    rmtree = shutil.rmtree

    def leave_the_folder(path: Path, **options: Any) -> None:
        if isinstance(path, str):  # of the tempfile module
            rmtree(path, **options)
            return
        for file in filter(Path.is_file, path.rglob("*")):
            file.unlink()

    cache = opened(2500)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", leave_the_folder)
        for number in (1, 2, 3, 4, 5):
            _fetch(cache, store, number)
        assert stores.files_in(cache.path) == _version(5)


def test_too_many_links(
    store: type[Faulty], opened: Callable[..., ModelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of which the file system takes no more links is copied."""
    cache = opened()
    _fetch(cache, store, 1)
    link = os.link

    def refuse(source: Path, target: Path) -> None:
        if source.parent.name == "blobs":
            raise OSError(errno.EMLINK, "Too many links")
        link(source, target)

    monkeypatch.setattr(os, "link", refuse)
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(cache.path) == _version(1)
    store.files = {**_version(1), "b/config.pbtxt": b"x"}
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert stores.files_in(cache.path) == store.files


def test_a_progress_that_cannot_be_shown(
    store: type[Faulty], opened: Callable[..., ModelCache]
) -> None:
    """What has come is kept."""

    def show(done: int, _total: int) -> None:
        if done > 1:
            raise BrokenPipeError("Broken pipe")

    with pytest.raises(ServerError, match="Broken pipe"):
        opened().fetch(Store(stores.URL), show)
    cache = opened()
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert store.bytes_read == _ALL


def test_an_empty_version(store: type[Faulty], opened: Callable[..., ModelCache]) -> None:
    """Of an ensemble, which Triton refuses without it."""
    store.files = {"ensemble/config.pbtxt": b"x", "ensemble/1/": b""}
    cache = opened()
    cache.use(cache.fetch(Store(stores.URL), stores.ignore))
    assert (cache.path / "ensemble" / "1").is_dir()
    assert stores.files_in(cache.path) == {"ensemble/config.pbtxt": b"x"}
