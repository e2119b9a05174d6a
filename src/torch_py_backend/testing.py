"""A pytest fixture for tests of models.

`pytest_plugins = ["torch_py_backend.testing"]` in conftest.py enables it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_py_backend.server.local_server import LocalServer, serve


@pytest.fixture(scope="session")
def triton_server() -> Iterator[Callable[[str | Path], LocalServer]]:
    """A function that returns a server of a model repository.

    The server starts at the first call with this repository and stops with the last test.
    """
    servers: dict[str, LocalServer] = {}
    with contextlib.ExitStack() as stack:

        def server(repository: str | Path) -> LocalServer:
            one = serve(repository)
            if one.repository not in servers:
                servers[one.repository] = stack.enter_context(one)
            return servers[one.repository]

        yield server
