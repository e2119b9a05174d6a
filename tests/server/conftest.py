"""A server of S3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import stores


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
