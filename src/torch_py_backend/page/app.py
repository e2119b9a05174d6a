"""Liveness and readiness over HTTP, for Kubernetes and load balancers.

GET /live           200 while the models are monitored and tritonserver answers; else 503
GET /ready          200 if every model that should serve does; else 503
GET /ready/MODEL    the same for one model, with the warnings of its load; 404 if it should not
                    serve

Slow or hostile clients delay neither probes nor the supervisor: the endpoints have threads of their
own, and connections are limited in number, size and time.
"""

from __future__ import annotations

import collections
import contextlib
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from torch_py_backend.errors import sanitize_line

if TYPE_CHECKING:
    from typing_extensions import Self

# A supervisor with an older snapshot has stopped to monitor the models.
_STALE_S = 30.0
# A connection ends with its response, after this time, or when so many newer ones were opened.
_CONNECTION_S = 10.0
_MAX_CONNECTIONS = 64
# Connections that the kernel keeps until they are accepted, all of them at once.
_BACKLOG = 512
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The readiness of all models at one moment.

    Attributes:
        models: the models that should serve, each with the reason why it does not; empty: it does.
        problem: a problem of the whole server.
        at: when it was taken, in seconds of a monotonic clock; 0: before the first step.
        warnings: the warnings of the last load of each model that serves, if there were any.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    problem: str = "the server is being started"
    at: float = 0.0
    warnings: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Page(ThreadingHTTPServer):
    """The HTTP server of these endpoints, as a context manager.

    Args:
        listener: a socket that listens; closed at the end.
        snapshot: returns the readiness of the models.

    Attributes:
        stopping: whether the endpoints report that nothing is ready, since the server is stopped.
    """

    daemon_threads = True

    def __init__(self, listener: socket.socket, snapshot: Callable[[], Snapshot]) -> None:
        super().__init__(("", 0), _Connection, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        listener.listen(_BACKLOG)
        self.stopping, self._snapshot = False, snapshot
        # The connections and their starts, in the order of their arrival.
        self._opened: collections.deque[tuple[float, socket.socket]] = collections.deque()
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_S,), name="page", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def answer(self, path: str) -> tuple[HTTPStatus, dict[str, object]]:
        """Return the status and the JSON for a path."""
        snapshot = self._snapshot()
        is_stale = snapshot.at and time.monotonic() - snapshot.at > _STALE_S
        problem = snapshot.problem or ("the models are no longer monitored" if is_stale else "")
        _, *parts = map(urllib.parse.unquote, path.partition("?")[0].split("/"))
        if parts == ["live"]:
            return _answer("live", problem)
        if self.stopping:
            problem = "the server is being stopped"
        match parts:
            case ["ready"]:
                reasons = {name: reason for name, reason in snapshot.models.items() if reason}
                problem = problem or ("models do not serve" if reasons else "")
                return _answer("ready", problem, {"models": reasons})
            case ["ready", model] if problem or model in snapshot.models:
                warnings = [sanitize_line(text) for text in snapshot.warnings.get(model, ())]
                return _answer("ready", problem or snapshot.models[model], {"warnings": warnings})
            case ["ready", _]:
                body = {"ready": False, "reason": "no such model should serve"}
                return HTTPStatus.NOT_FOUND, body
        return HTTPStatus.NOT_FOUND, {"error": "expected /live, /ready or /ready/MODEL"}

    # --- connections -----------------------------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread."""
        self._opened.append((time.monotonic(), request))
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End connections that are too old or too many; called several times a second."""
        oldest = time.monotonic() - _CONNECTION_S
        while self._opened and (
            len(self._opened) > _MAX_CONNECTIONS or self._opened[0][0] < oldest
        ):
            with contextlib.suppress(OSError):  # it has ended
                self._opened.popleft()[1].shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """Log nothing: a client has left."""


def _answer(
    key: str, reason: str, more: Mapping[str, object] | None = None
) -> tuple[HTTPStatus, dict[str, object]]:
    """Return 200 without a reason, else 503; empty values are left out."""
    status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
    details = {"reason": reason, **(more or {})}
    return status, {key: not reason, **{name: value for name, value in details.items() if value}}


class _Connection(BaseHTTPRequestHandler):
    server: Page
    server_version, sys_version = "torch-py-backend", ""

    def do_GET(self) -> None:
        status, document = self.server.answer(self.path)
        # In ASCII: a name given on the command line need not be UTF-8.
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  http.server's name

    def log_message(self, *_: object) -> None:
        """Log nothing: a probe comes each second."""
