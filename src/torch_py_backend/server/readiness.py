"""Liveness and readiness over HTTP, for Kubernetes and load balancers.

GET /live           200 while the models are monitored and tritonserver answers; else 503
GET /ready          200 if every model that should serve does; else 503
GET /ready/MODEL    the same for one model, with the warnings of its load; 404 if it should not
                    serve
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from torch_py_backend.errors import sanitize_line
from torch_py_backend.server.lifecycle import Snapshot
from torch_py_backend.server.ports import client_address

if TYPE_CHECKING:
    from typing_extensions import Self

# A supervisor with an older snapshot has stopped to monitor the models.
_STALE_S = 30.0
_IDLE_S = 10.0
# Each connection has a thread. Above this number, the oldest ones are closed: clients that send
# nothing do not block probes.
_MAX_CONNECTIONS = 64
Response = tuple[HTTPStatus, dict[str, object]]


class ReadinessServer(ThreadingTCPServer):
    """The HTTP server of these endpoints, as a context manager; port 0 takes a free one."""

    # Not http.server's classes, which look the name of the address up: that may take long.
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: str, port: int, snapshot: Callable[[], Snapshot]) -> None:
        super().__init__((address, port), _Handler)
        self._snapshot = snapshot
        self._stopping = False
        self._connections: dict[socket.socket, None] = {}  # in the order of their arrival
        self.address = client_address(address, self.server_address[1])

    def set_stopping(self) -> None:
        """Report from now on that nothing is ready."""
        self._stopping = True

    def answer(self, path: str) -> Response:
        """Return the status and JSON for a path."""
        snapshot = self._snapshot()
        is_stale = snapshot.at and time.monotonic() - snapshot.at > _STALE_S
        stale = "the models are no longer monitored" if is_stale else ""
        server_problem = snapshot.problem or stale
        problem = "the server is being stopped" if self._stopping else server_problem
        match [unquote(part) for part in path.partition("?")[0].split("/") if part]:
            case ["live"]:
                return _response("live", server_problem)
            case ["ready"]:
                reasons = {name: reason for name, reason in snapshot.models.items() if reason}
                if not problem and not reasons:
                    return HTTPStatus.OK, {"ready": True}
                body = {"ready": False, "models": reasons}
                return HTTPStatus.SERVICE_UNAVAILABLE, body | (
                    {"reason": problem} if problem else {}
                )
            case ["ready", model] if problem or model in snapshot.models:
                status, body = _response("ready", problem or snapshot.models[model])
                warnings = [sanitize_line(text) for text in snapshot.warnings.get(model, ())]
                return status, body | ({"warnings": warnings} if warnings else {})
            case ["ready", _]:
                body = {"ready": False, "reason": "no such model should serve"}
                return HTTPStatus.NOT_FOUND, body
        return HTTPStatus.NOT_FOUND, {"error": "expected /live, /ready or /ready/MODEL"}

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: object) -> None:
        """Serve a connection in a thread of its own; close the oldest if there are too many."""
        self._connections[request] = None
        for oldest in list(self._connections)[:-_MAX_CONNECTIONS]:
            with contextlib.suppress(OSError):  # its thread has closed it
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection: at the end of its thread, or if no thread can be started."""
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of connections: clients may disconnect at any time."""


class _Handler(BaseHTTPRequestHandler):
    server: ReadinessServer
    server_version = "torch-py-backend"
    sys_version = ""
    timeout = _IDLE_S

    def do_GET(self) -> None:
        status, document = self.server.answer(self.path)
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  http.server's name

    def log_message(self, *_: object) -> None:
        """Log nothing: probes arrive every second."""


def _response(key: str, reason: str) -> Response:
    if reason:
        return HTTPStatus.SERVICE_UNAVAILABLE, {key: False, "reason": reason}
    return HTTPStatus.OK, {key: True}
