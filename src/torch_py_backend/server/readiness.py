"""Liveness and readiness over HTTP, for Kubernetes and load balancers.

GET /live           200 while this process watches and tritonserver answers
GET /ready          200 if every model that should serve does; else 503
GET /ready/MODEL    the same of one model; 404 if it should not serve
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from torch_py_backend.errors import ServerError
from torch_py_backend.server.supervision import Snapshot

if TYPE_CHECKING:
    from typing_extensions import Self

# A watcher that has not looked for so long watches no more.
_STALE_S = 30.0
_IDLE_S = 10.0
# Each has a thread. Beyond so many, the oldest are closed; beyond twice as many, new ones.
_CONNECTIONS = 64
Answer = tuple[HTTPStatus, dict[str, Any]]


class Told(Protocol):
    """Who knows how the models stand: see `supervision.Supervisor`."""

    snapshot: Snapshot


class Readiness:
    """The HTTP server of these endpoints. A context manager: leaving stops it.

    Args:
        address: where it listens.
        port: its port; 0 takes a free one.
        told: has the snapshot of how the models stand.
        lives: asks tritonserver whether it lives.

    Raises:
        ServerError: the port is taken.
    """

    def __init__(
        self,
        address: str,
        port: int,
        told: Told,
        lives: Callable[[], bool],
    ) -> None:
        self._told, self._lives = told, lives
        self._stopping = False
        try:
            self._server = _Server((address, port), _Handler)
        except OSError as error:
            raise ServerError(
                f"--health-port {port} on {address} cannot be listened on: {error.strerror}."
            ) from None
        self._server.answer = self.answer
        host = "127.0.0.1" if address == "0.0.0.0" else address  # noqa: S104
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def stopping(self) -> None:
        """From now on nothing is ready."""
        self._stopping = True

    def answer(self, path: str) -> Answer:
        """Status and JSON for a path."""
        parts = [unquote(part) for part in path.partition("?")[0].split("/") if part]
        if parts == ["live"]:
            return self._live()
        if parts[:1] == ["ready"] and len(parts) <= 2:  # noqa: PLR2004  ready, MODEL
            return self._ready(parts[1]) if parts[1:] else self._all_ready()
        return HTTPStatus.NOT_FOUND, {"error": "expected /live, /ready or /ready/MODEL"}

    def _live(self) -> Answer:
        if self._stale():
            return _unavailable({"live": False, "reason": "the models are not watched any more"})
        if not self._lives():
            return _unavailable({"live": False, "reason": "tritonserver does not answer"})
        return HTTPStatus.OK, {"live": True}

    def _all_ready(self) -> Answer:
        reasons = {name: why for name, why in self._told.snapshot.models.items() if why}
        problem = self._problem()
        if not problem and not reasons:
            return HTTPStatus.OK, {"ready": True}
        told: dict[str, Any] = {"ready": False, "models": reasons}
        return _unavailable(told | ({"reason": problem} if problem else {}))

    def _ready(self, model: str) -> Answer:
        models = self._told.snapshot.models
        problem = self._problem() or models.get(model, "")
        if problem:
            return _unavailable({"ready": False, "reason": problem})
        if model not in models:
            return HTTPStatus.NOT_FOUND, {"ready": False, "reason": "no such model should serve"}
        return HTTPStatus.OK, {"ready": True}

    def _problem(self) -> str:
        """What keeps every model from being ready."""
        if self._stopping:
            return "the server is being stopped"
        snapshot = self._told.snapshot
        if snapshot.problem:
            return snapshot.problem
        return "the models are not watched any more" if self._stale() else ""

    def _stale(self) -> bool:
        at = self._told.snapshot.at
        return bool(at) and time.monotonic() - at > _STALE_S

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    answer: Callable[[str], Answer]

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        super().__init__(address, handler)
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, as long as there are not too many."""
        with self._lock:
            full = len(self._open) >= 2 * _CONNECTIONS
            if not full:
                self._open.append(request)
            for oldest in self._open[:-_CONNECTIONS]:
                with contextlib.suppress(OSError):  # its client was quicker
                    oldest.shutdown(socket.SHUT_RDWR)
        if full:
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; called by its thread, at the end."""
        with self._lock:
            if request in self._open:
                self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "torch-py-backend"
    sys_version = ""
    timeout = _IDLE_S

    def do_GET(self) -> None:
        status, told = self.server.answer(self.path)
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  http.server's name

    def log_message(self, *_: Any) -> None:
        """Probes come every second: they are not logged."""


def _unavailable(told: dict[str, Any]) -> Answer:
    return HTTPStatus.SERVICE_UNAVAILABLE, told
