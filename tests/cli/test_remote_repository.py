"""The options of `serve` for object stores."""

from __future__ import annotations

import pytest

from torch_py_backend.cli.remote_repository import parse_size
from torch_py_backend.errors import ServerError


@pytest.mark.parametrize(
    ("text", "size"),
    [("100GB", 100 * 10**9), ("1.5 TB", 15 * 10**11), ("20kB", 20_000), ("7B", 7), ("1MB", 10**6)],
)
def test_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "100", "-1GB", "1GiB", "1 PB", "1e3GB", "1,5GB"])
def test_no_size(text: str) -> None:
    with pytest.raises(ServerError, match=r"--cache-size is .*; expected a size such as 100GB"):
        parse_size(text)
