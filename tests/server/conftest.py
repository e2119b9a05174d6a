"""Stores, and caches of what is fetched from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stores

from torch_py_backend.server import object_store
from torch_py_backend.server.model_cache import ModelCache


@pytest.fixture(scope="module")
def s3_server() -> Iterator[stores.S3]:
    server = stores.S3()
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        yield server


@pytest.fixture
def s3(s3_server: stores.S3, monkeypatch: pytest.MonkeyPatch) -> stores.S3:
    """An empty server of S3, which s3:// is in this process."""
    s3_server.empty()
    for name, value in s3_server.variables.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[stores.Faulty]]:
    """A store whose faults are set, with the files `stores.FILES`."""
    monkeypatch.setattr(object_store, "_PAUSE_S", 0)
    with stores.faulty() as one:
        one.files = dict(stores.FILES)
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
