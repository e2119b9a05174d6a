"""A repository that follows the one in a store, and what it does while the store fails."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator

import pytest
import stores
from stores import Faulty

from torch_py_backend.errors import ServerError
from torch_py_backend.server import model_cache
from torch_py_backend.server.mirror import Mirror
from torch_py_backend.server.model_cache import ModelCache
from torch_py_backend.server.object_store import Store
from torch_py_backend.server.store_errors import StoreError


class _Polled:
    """A mirror that polls every few milliseconds, and what it reports."""

    def __init__(self, cache: ModelCache, *, uploads: bool = False) -> None:
        self.reports: list[str] = []
        self.is_loading = False
        self.cache = cache
        self.mirror = Mirror(
            Store(stores.URL), cache, self.reports.append, seconds=0.005, uploads=uploads
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
            one.mirror.open(stores.ignore)
            return one

        yield poll


def test_a_change_is_served_between_two_loads(
    store: type[Faulty], polled: Callable[..., _Polled]
) -> None:
    one = polled()
    one.is_loading = True
    store.files = {**stores.FILES, "a/2/model.pt": b"two"}
    one.until(lambda: one.mirror._next is not None)
    one.mirror.step(lambda: True)
    assert stores.files_in(one.cache.path) == stores.FILES
    one.is_loading = False
    one.until(lambda: bool(one.reports))
    assert one.reports == ["faulty://models has changed; its new files are in place."]
    assert stores.files_in(one.cache.path) == store.files


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
            "faulty://models cannot be read: OSError: down. The models keep serving."
        ]
        assert stores.files_in(one.cache.path) == stores.FILES
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
        "faulty://models cannot be read: OSError: down. Serving the files that were fetched last."
    ]
    assert stores.files_in(one.cache.path) == stores.FILES
    store.listing_error = None
    store.files = {"a/config.pbtxt": b"y"}
    one.until(lambda: stores.files_in(one.cache.path) == store.files)


@pytest.mark.parametrize("error", [PermissionError("revoked"), FileNotFoundError("bucket")])
def test_started_without_access(
    store: type[Faulty], polled: Callable[..., _Polled], error: Exception
) -> None:
    """What was fetched before is not served to those who may not read it now."""
    polled().mirror.close()
    store.listing_error = error
    with pytest.raises(StoreError, match=r"access is denied|does not exist"):
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
    assert store.files == {**stores.FILES, "a/compile_cache/a-0123.bundle": b"compiled"}
    time.sleep(0.1)
    one.mirror.step(lambda: False)
    assert len(one.reports) == 1
    one.mirror.close()
    shutil.rmtree(one.cache._folder)
    assert stores.files_in(polled().cache.path) == store.files


def test_compiled_code_is_kept_when_the_repository_changes(
    store: type[Faulty], polled: Callable[..., _Polled]
) -> None:
    """It is not uploaded if nobody asked for it."""
    one = polled()
    _compile(one)
    store.files = {**stores.FILES, "a/config.pbtxt": b"y"}
    one.until(lambda: bool(one.reports))
    expected = {**store.files, "a/compile_cache/a-0123.bundle": b"compiled"}
    assert stores.files_in(one.cache.path) == expected
    assert "a/compile_cache/a-0123.bundle" not in store.files


def test_files_that_are_uploaded_one_by_one(
    store: type[Faulty], opened: Callable[..., ModelCache]
) -> None:
    """A change is served when two polls in a row find the same."""
    cache = opened()
    reports: list[str] = []
    mirror = Mirror(Store(stores.URL), cache, reports.append, seconds=0, uploads=False)
    mirror.open(stores.ignore)
    for number in range(2, 5):
        store.files = {**store.files, f"a/{number}/model.pt": b"part"}
        mirror._poll()
        mirror.step(lambda: False)
    assert reports == []
    assert stores.files_in(cache.path) == stores.FILES
    mirror._poll()
    mirror.step(lambda: False)
    assert reports == ["faulty://models has changed; its new files are in place."]
    assert stores.files_in(cache.path) == store.files


def test_a_link_that_cannot_be_replaced(
    store: type[Faulty], polled: Callable[..., _Polled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported, the models serve on, and the change is served later."""
    one = polled()
    with monkeypatch.context() as patch:
        patch.setattr(ModelCache, "use", lambda *_: _raise(ServerError("No space left on device.")))
        store.files = {"a/config.pbtxt": b"y"}
        one.until(lambda: bool(one.reports))
        assert "No space left on device. The models keep serving." in one.reports[0]
        assert stores.files_in(one.cache.path) == stores.FILES
    one.until(lambda: stores.files_in(one.cache.path) == store.files)


def _raise(error: Exception) -> None:
    raise error
