"""The HTTP server of probes and page, in a thread of its own.

Connections are limited in number, size and time: no client delays probes or the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute
from uvicorn.protocols.http.h11_impl import H11Protocol

# A connection ends with its response, after this time, or when so many newer ones were opened.
_CONNECTION_S = 12.0
_MAX_CONNECTIONS = 64
# Requests that are no HTTP are not worth a line.
_SILENT = logging.getLogger(f"{__name__}.connections")
_SILENT.disabled = True
_POLICY = "default-src 'self'; img-src 'self' blob:; base-uri 'none'; frame-ancestors 'none'"
_HEADERS = [
    ("Connection", "close"),
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", _POLICY),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
]


@contextlib.contextmanager
def run(listener: socket.socket, routes: Sequence[BaseRoute]) -> Iterator[None]:
    """Serve endpoints in a thread; close the listener at the end."""
    config = uvicorn.Config(
        Starlette(routes=routes),
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,  # that of this process stays as it is
        access_log=False,
        headers=_HEADERS,
    )
    config.load()  # its imports belong to this thread: others may import meanwhile
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


class _Connection(H11Protocol):
    """A connection of a client, which is closed when it takes too long, or when there are many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.logger = _SILENT
        self.loop.call_later(_CONNECTION_S, transport.abort)
        self.opened_at = self.loop.time()
        if len(self.connections) > _MAX_CONNECTIONS:
            oldest: Any = min(self.connections, key=operator.attrgetter("opened_at"))
            self.connections.remove(oldest)
            oldest.transport.abort()
