"""Repositories of a store on the local disk: fetched once, whole, and kept within a limit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stores
from stores import Faulty

from torch_py_backend.errors import ServerError
from torch_py_backend.server import model_cache, object_store
from torch_py_backend.server.model_cache import Mirror, ModelCache
from torch_py_backend.server.object_store import Store, StoreError

_WEIGHTS = bytes(range(256)) * 100
_FILES = {"a/config.pbtxt": b"x", "a/1/model.pt": _WEIGHTS}
_ALL = sum(map(len, _FILES.values()))
_URL = "faulty://models"


def _ignore(_done: int, _total: int) -> None:
    pass


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Faulty]]:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with stores.faulty() as one:
        one.files = dict(_FILES)
        yield one


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., ModelCache]]:
    """Open a cache in the test's folder."""
    with contextlib.ExitStack() as stack:

        def open_one(limit: int = 1 << 30, **how: Any) -> ModelCache:
            cache = ModelCache(tmp_path / "cache", limit, **how)
            stack.callback(cache.close)
            return cache

        yield open_one


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _blobs(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("cache/user-*/blobs/*"))


def test_fetched_once(store: type[Faulty], opened: Callable[..., ModelCache]) -> None:
    """A second server has the same files, of the same inodes, and reads nothing."""
    caches = opened(), opened()
    told: list[tuple[int, int]] = []
    for cache in caches:
        cache.use(cache.fetch(Store(_URL), lambda done, total: told.append((done, total))))
        assert _files(cache.path) == _FILES
    assert store.bytes_read == _ALL
    assert told[-1] == (_ALL, _ALL)
    assert len({(cache.path / "a/1/model.pt").stat().st_ino for cache in caches}) == 1
    # No writer of the repository can change what others serve.
    assert (caches[0].path / "a/1/model.pt").stat().st_mode & 0o222 == 0


def test_versions_that_share_files(s3: stores.S3, opened: Callable[..., ModelCache]) -> None:
    """Files of another folder of the bucket are not fetched again if their contents are equal."""
    s3.put("bucket/monday", _FILES)
    s3.put("bucket/tuesday", {**_FILES, "a/config.pbtxt": b"other"})
    cache = opened()
    fetched: list[int] = []
    for day in ("monday", "tuesday"):
        cache.use(cache.fetch(Store(f"s3://bucket/{day}"), lambda _, total: fetched.append(total)))
    assert fetched[-1] == len(b"other")
    assert _files(cache.path) == {**_FILES, "a/config.pbtxt": b"other"}


def test_four_at_once(store: type[Faulty], opened: Callable[..., ModelCache]) -> None:
    waits: list[None] = []

    def fetch(_: int) -> dict[str, bytes]:
        cache = opened(on_wait=lambda: waits.append(None))
        cache.use(cache.fetch(Store(_URL), lambda *_: time.sleep(0.05)))
        return _files(cache.path)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert list(pool.map(fetch, range(4))) == [_FILES] * 4
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
        opened().fetch(Store(_URL), _ignore)
    read = store.bytes_read
    assert 0 < read < _ALL
    assert any(name.endswith(".part") for name in _blobs(tmp_path))
    cache = opened()
    cache.use(cache.fetch(Store(_URL), _ignore))
    assert _files(cache.path) == _FILES
    assert store.bytes_read == _ALL
    assert not any(name.endswith(".part") for name in _blobs(tmp_path))


def test_a_part_from_before_the_machine_started_is_not_continued(
    store: type[Faulty], opened: Callable[..., ModelCache], tmp_path: Path
) -> None:
    """It may have the length of what was written, but not the contents."""
    store.reading_errors = [None, *[OSError("gone") for _ in range(5)]]
    with pytest.raises(StoreError, match="gone"):
        opened().fetch(Store(_URL), _ignore)
    (part,) = (tmp_path / "cache").rglob("*.part")
    part.write_bytes(bytes(100))
    os.utime(part, (1, 1))
    cache = opened()
    cache.use(cache.fetch(Store(_URL), _ignore))
    assert _files(cache.path) == _FILES


def test_wrong_digest(
    store: type[Faulty], opened: Callable[..., ModelCache], tmp_path: Path
) -> None:
    """The file is not kept; the right one is fetched the next time."""
    right = hashlib.sha256(_WEIGHTS).hexdigest()
    store.facts["a/1/model.pt"] = {"lfs": {"sha256": right}}
    store.files["a/1/model.pt"] = bytes(len(_WEIGHTS))
    with pytest.raises(StoreError, match=f"a/1/model.pt has the sha256 .*; expected {right}"):
        opened().fetch(Store(_URL), _ignore)
    assert len(_blobs(tmp_path)) <= 1
    store.files["a/1/model.pt"] = _WEIGHTS
    cache = opened()
    cache.use(cache.fetch(Store(_URL), _ignore))
    assert _files(cache.path) == _FILES


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
        {"a/config.pbtxt": b"y", "a/1/model.pt": b"other" + _WEIGHTS[5:]},
        {"a/config.pbtxt": b"y"},
        {**_FILES, "a/2/model.pt": b"more"},
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
    cache.use(cache.fetch(Store(_URL), _ignore))
    assert _files(cache.path) == files
    store.files = dict(_FILES)
    cache.use(cache.fetch(Store(_URL), _ignore))
    assert _files(cache.path) == _FILES


def test_a_file_that_changes_between_its_pieces(
    store: type[Faulty], opened: Callable[..., ModelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read of two versions of one file is kept for neither."""
    monkeypatch.setattr(object_store, "_PIECE", 1000)
    monkeypatch.setattr(object_store, "_PIECES", 1)
    pieces = Store._read_pieces
    others = {**_FILES, "a/1/model.pt": bytes(len(_WEIGHTS))}
    replacements = [others]

    def replace(self: Store, *arguments: Any) -> Any:
        result = pieces(self, *arguments)
        if replacements and arguments[0].path.name == "model.pt":
            store.files = replacements.pop()
        return result

    monkeypatch.setattr(Store, "_read_pieces", replace)
    cache = opened()
    cache.use(cache.fetch(Store(_URL), _ignore))
    assert _files(cache.path) == others
    store.files = dict(_FILES)
    cache.use(cache.fetch(Store(_URL), _ignore))
    assert _files(cache.path) == _FILES


def test_changed_all_the_time(
    store: type[Faulty], opened: Callable[..., ModelCache], change: Callable[..., None]
) -> None:
    cache = opened()
    cache.use(cache.fetch(Store(_URL), _ignore))
    store.files = {"a/config.pbtxt": b"y"}
    for number in range(20):
        change({"a/config.pbtxt": bytes(number)})
    with pytest.raises(StoreError, match="changes while it is read") as raised:
        cache.fetch(Store(_URL), _ignore)
    assert raised.value.temporary
    assert _files(cache.path) == _FILES


# --- the limit --------------------------------------------------------------------------------


def _version(number: int) -> dict[str, bytes]:
    return {"a/config.pbtxt": b"x", "a/1/model.pt": bytes([number]) * 1000}


def _fetch(cache: ModelCache, store: type[Faulty], number: int) -> None:
    store.files = _version(number)
    cache.use(cache.fetch(Store(f"faulty://models{number}"), _ignore))
    time.sleep(0.02)  # the time of use has another value


def test_least_recently_used_leave(
    store: type[Faulty], opened: Callable[..., ModelCache], tmp_path: Path
) -> None:
    """But none that a live server uses."""
    used = opened(3500)
    _fetch(used, store, 1)
    other = opened(3500)
    for number in (2, 3, 2, 4):
        _fetch(other, store, number)
    # 3 was used before 2, and 1 is in use.
    assert _files(used.path) == _version(1)
    assert _files(other.path) == _version(4)
    kept = [path.name for path in tmp_path.glob("cache/user-*/snapshots/*")]
    assert len(kept) == 3
    store.bytes_read = 0
    _fetch(other, store, 2)
    assert store.bytes_read == 0
    _fetch(other, store, 3)
    assert store.bytes_read > 0


def test_a_server_that_was_killed_uses_nothing(
    store: type[Faulty], opened: Callable[..., ModelCache], tmp_path: Path
) -> None:
    killed = opened(2500)
    _fetch(killed, store, 1)
    killed._lock.close()  # as the kernel does
    cache = opened(2500)
    _fetch(cache, store, 2)
    _fetch(cache, store, 3)
    assert _files(cache.path) == _version(3)
    assert len(list(tmp_path.glob("cache/user-*/servers/*"))) == 1


def test_too_large(store: type[Faulty], opened: Callable[..., ModelCache]) -> None:
    cache = opened(1500)
    _fetch(cache, store, 1)
    with pytest.raises(StoreError, match=r"needs 1e-06 GB more .* \(--cache-size\)"):
        _fetch(cache, store, 2)
    assert _files(cache.path) == _version(1)


def test_full_disk(
    store: type[Faulty], opened: Callable[..., ModelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known before, or seen while it is written: nothing incomplete is served."""
    cache = opened()
    _fetch(cache, store, 1)
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
        with pytest.raises(StoreError, match="its disk has 1e-08 GB left"):
            _fetch(cache, store, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: _raise(OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(StoreError, match=r"the disk of .* is full") as raised:
            _fetch(cache, store, 2)
    assert raised.value.temporary
    assert _files(cache.path) == _version(1)
    _fetch(cache, store, 2)
    assert _files(cache.path) == _version(2)


def _raise(error: Exception) -> None:
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
        opened().fetch(Store(_URL), _ignore)


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
        cache.use(cache.fetch(Store(_URL), _ignore))
        assert _files(cache.path) == {"b/config.pbtxt": b"x", "b/1/model.pt": _WEIGHTS}
    assert len(calls) == 1


# --- polling ----------------------------------------------------------------------------------


class _Polled:
    """A mirror that polls every few milliseconds, and what it reports."""

    def __init__(self, cache: ModelCache, *, uploads: bool = False) -> None:
        self.reports: list[str] = []
        self.is_loading = False
        self.cache = cache
        self.mirror = Mirror(
            Store(_URL), cache, self.reports.append, seconds=0.005, uploads=uploads
        )

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, self.reports
            self.mirror.step(lambda: self.is_loading)
            time.sleep(0.01)


@pytest.fixture
def polled(
    store: type[Faulty], opened: Callable[..., ModelCache]
) -> Iterator[Callable[..., _Polled]]:
    with contextlib.ExitStack() as stack:

        def poll(**how: bool) -> _Polled:
            one = _Polled(opened(), **how)
            stack.callback(one.mirror.close)
            one.mirror.open(_ignore)
            return one

        yield poll


def test_a_change_is_served_between_two_loads(
    store: type[Faulty], polled: Callable[..., _Polled]
) -> None:
    one = polled()
    one.is_loading = True
    store.files = {**_FILES, "a/2/model.pt": b"two"}
    one.until(lambda: one.mirror._next is not None)
    one.mirror.step(lambda: True)
    assert _files(one.cache.path) == _FILES
    one.is_loading = False
    one.until(lambda: bool(one.reports))
    assert one.reports == ["faulty://models has changed: its files are here."]
    assert _files(one.cache.path) == store.files


def test_a_store_that_fails_while_models_serve(
    store: type[Faulty], polled: Callable[..., _Polled]
) -> None:
    """Each problem is reported once, and again after the store answered."""
    one = polled()
    for _ in range(2):
        store.listing_error = OSError("down")
        one.until(lambda: bool(one.reports))
        time.sleep(0.1)
        one.mirror.step(lambda: False)
        assert one.reports == [
            "faulty://models cannot be read: OSError: down. The models serve on."
        ]
        assert _files(one.cache.path) == _FILES
        one.reports.clear()
        store.listing_error = None
        one.until(lambda: not one.mirror._problem)


def test_started_while_the_store_is_down(
    store: type[Faulty], polled: Callable[..., _Polled]
) -> None:
    """What was fetched last is served, and read anew when the store answers."""
    polled().mirror.close()
    store.listing_error = OSError("down")
    one = polled()
    assert one.reports == [
        "faulty://models cannot be read: OSError: down. What was fetched last is served."
    ]
    assert _files(one.cache.path) == _FILES
    store.listing_error = None
    store.files = {"a/config.pbtxt": b"y"}
    one.until(lambda: _files(one.cache.path) == store.files)


@pytest.mark.parametrize("error", [PermissionError("revoked"), FileNotFoundError("bucket")])
def test_started_without_access(
    store: type[Faulty], polled: Callable[..., _Polled], error: Exception
) -> None:
    """What was fetched before is not served to those who may not read it now."""
    polled().mirror.close()
    store.listing_error = error
    with pytest.raises(StoreError, match=r"access is denied|not there"):
        polled()


def test_started_for_the_first_time_while_the_store_is_down(
    store: type[Faulty], polled: Callable[..., _Polled]
) -> None:
    store.listing_error = OSError("down")
    with pytest.raises(StoreError, match="down"):
        polled()


def _compile(one: _Polled) -> None:
    folder = one.cache.path / "a" / model_cache.COMPILED
    folder.mkdir(mode=0o700)
    (folder / "a-0123.bundle").write_bytes(b"compiled")
    (folder / "a-0123.lock").write_bytes(b"")


def test_compiled_code_is_uploaded(store: type[Faulty], polled: Callable[..., _Polled]) -> None:
    """Another machine gets it, and its arrival is no change of the repository."""
    one = polled(uploads=True)
    _compile(one)
    one.until(lambda: bool(one.reports))
    assert one.reports == ["a/compile_cache/a-0123.bundle was written to faulty://models."]
    assert store.files == {**_FILES, "a/compile_cache/a-0123.bundle": b"compiled"}
    time.sleep(0.1)
    one.mirror.step(lambda: False)
    assert len(one.reports) == 1
    one.mirror.close()
    shutil.rmtree(one.cache._folder)
    assert _files(polled().cache.path) == store.files


def test_compiled_code_is_kept_when_the_repository_changes(
    store: type[Faulty], polled: Callable[..., _Polled]
) -> None:
    """It is not uploaded if nobody asked for it."""
    one = polled()
    _compile(one)
    store.files = {**_FILES, "a/config.pbtxt": b"y"}
    one.until(lambda: bool(one.reports))
    expected = {**store.files, "a/compile_cache/a-0123.bundle": b"compiled"}
    assert _files(one.cache.path) == expected
    assert "a/compile_cache/a-0123.bundle" not in store.files
