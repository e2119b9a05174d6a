"""Liveness and readiness over HTTP, for Kubernetes and load balancers.

GET /live           200 while the models are monitored and tritonserver answers; else 503
GET /ready          200 if every model that should serve does; else 503
GET /ready/MODEL    the same for one model, with the warnings of its load; else 404

Slow or hostile clients delay neither probes nor the supervisor: the endpoints have a thread of
their own, and connections are limited in number, size and time.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from torch_py_backend.errors import sanitize_line

if TYPE_CHECKING:
    from typing_extensions import Self

# A connection ends with its response, after this time, or when so many newer ones were opened.
_CONNECTION_S = 10.0
_MAX_CONNECTIONS = 64
# Requests that are no HTTP are not worth a line.
_SILENT = logging.getLogger(f"{__name__}.connections")
_SILENT.disabled = True


class Snapshot(NamedTuple):
    """The readiness of all models at one moment.

    Attributes:
        models: the models that should serve, each with the reason why it does not; empty: it does.
        problem: a problem of the whole server.
        warnings: the warnings of the last load of each model that serves.
    """

    models: Mapping[str, str]
    problem: str
    warnings: Mapping[str, Sequence[str]]


class Page:
    """The HTTP server of these endpoints, as a context manager, which closes its listener.

    Attributes:
        stopping: whether the endpoints report that nothing is ready, since the server is stopped.
    """

    def __init__(
        self,
        listener: socket.socket,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self.stopping = False
        self._snapshot = snapshot
        routes = [
            Route("/live", self._live),
            Route("/ready", self._ready),
            Route("/ready/{model}", self._ready),
        ]
        # The connections of this page, in the order of their arrival.
        opened: collections.deque[_Connection] = collections.deque()
        connect: Any = functools.partial(_Connection, opened)
        config = uvicorn.Config(
            Starlette(routes=routes),
            http=connect,
            ws="none",
            lifespan="off",
            log_config=None,  # that of this process stays as it is
            access_log=False,
            headers=[("Connection", "close")],
        )
        config.load()  # its imports belong to this thread: others may import meanwhile
        self._server = uvicorn.Server(config)
        run = functools.partial(self._server.run, [listener])
        self._thread = threading.Thread(target=run, name="page", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    async def _live(self, _request: Request) -> Response:
        return _response("live", self._snapshot().problem)

    async def _ready(self, request: Request) -> Response:
        snapshot = self._snapshot()
        model = request.path_params.get("model")
        if problem := "the server is being stopped" if self.stopping else snapshot.problem:
            return _response("ready", problem)
        if model is None:
            models = snapshot.models.items()
            reasons = {name: sanitize_line(reason) for name, reason in models if reason}
            return _response("ready", "models do not serve" if reasons else "", models=reasons)
        if model not in snapshot.models:
            return _response("ready", "no such model should serve", HTTPStatus.NOT_FOUND)
        warnings = [sanitize_line(text) for text in snapshot.warnings.get(model, ())]
        return _response("ready", sanitize_line(snapshot.models[model]), warnings=warnings)


def _response(
    key: str,
    reason: str,
    status: HTTPStatus = HTTPStatus.SERVICE_UNAVAILABLE,
    **more: object,
) -> Response:
    """Return 200 without a reason, else the status; empty values are left out."""
    details = {"reason": reason, **more}
    body = {name: value for name, value in details.items() if value}
    # In ASCII: a name given on the command line need not be UTF-8.
    text = json.dumps({key: not reason} | body)
    return Response(text, status if reason else HTTPStatus.OK, media_type="application/json")


class _Connection(H11Protocol):
    """A connection of a client, which is closed when it takes too long, or when there are many."""

    def __init__(
        self,
        opened: collections.deque[_Connection],
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.logger = _SILENT
        self._opened = opened

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(_CONNECTION_S, transport.abort)
        self._opened.append(self)
        if len(self._opened) > _MAX_CONNECTIONS:
            self._opened.popleft().transport.abort()
