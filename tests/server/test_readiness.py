"""The endpoints for probes: their statuses and JSON, and clients that misbehave."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from torch_py_backend.server import readiness as _readiness
from torch_py_backend.server.lifecycle import Snapshot
from torch_py_backend.server.readiness import ReadinessServer

_UNMONITORED = "the models are no longer monitored"
_NO_ANSWER = "tritonserver does not answer"
_UNKNOWN = "the parameter X is unknown and ignored"
_PATHS = {"error": "expected /live, /ready or /ready/MODEL"}


def _readiness_server(problem: str = "", age: float = 0.0) -> ReadinessServer:
    """Return a server whose snapshot has this problem and age in seconds; model b is down."""
    models = {"a": "", "b": "is down: died", "grüße": ""}
    warnings = {"a": [_UNKNOWN, "/srv/m/w.pt is unused"]}
    snapshot = Snapshot(models, problem, time.monotonic() - age, warnings)
    return ReadinessServer("127.0.0.1", 0, lambda: snapshot)


def _get(readiness: ReadinessServer, path: str = "/live", method: str = "GET") -> tuple[int, bytes]:
    client = http.client.HTTPConnection(readiness.address, timeout=60)
    with contextlib.closing(client):
        client.request(method, path)
        response = client.getresponse()
        return response.status, response.read()


def _connect(readiness: ReadinessServer) -> socket.socket:
    host, _, port = readiness.address.partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


@pytest.fixture(scope="module")
def running() -> Iterator[ReadinessServer]:
    with _readiness_server() as readiness:
        yield readiness


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/live", 200, {"live": True}),
        ("/ready?verbose", 503, {"ready": False, "models": {"b": "is down: died"}}),
        ("/ready/a", 200, {"ready": True, "warnings": [_UNKNOWN, "w.pt is unused"]}),
        ("/ready/gr%C3%BC%C3%9Fe/", 200, {"ready": True}),
        ("/ready/b", 503, {"ready": False, "reason": "is down: died"}),
        ("/ready/x", 404, {"ready": False, "reason": "no such model should serve"}),
        ("/ready/a/b", 404, _PATHS),
        ("/", 404, _PATHS),
    ],
)
def test_paths(path: str, status: int, body: dict[str, object], running: ReadinessServer) -> None:
    """Each path has a status and JSON; models are named as in a URL."""
    answer = _get(running, path)
    assert (answer[0], json.loads(answer[1])) == (status, body)


@pytest.mark.parametrize(
    ("problem", "age", "reason"),
    [
        pytest.param(_NO_ANSWER, 0, _NO_ANSWER, id="problem"),
        pytest.param("", 100, _UNMONITORED, id="stale"),
    ],
)
def test_problems_of_the_whole_server(problem: str, age: float, reason: str) -> None:
    """It is the reason why the server is not live, and no model is ready."""
    with _readiness_server(problem, age) as readiness:
        for path in ("/live", "/ready", "/ready/a", "/ready/x"):
            status, body = readiness.answer(path)
            assert (status, body["reason"]) == (503, reason)


def test_readiness_from_start_to_end() -> None:
    """Nothing is ready before the first snapshot, nor while the server stops, but it is live.

    A load balancer stops sending requests before the last ones are answered.
    """
    snapshots = [Snapshot({"a": ""}, "", time.monotonic())] * 3 + [Snapshot()]
    starting = {"ready": False, "models": {}, "reason": "the server is being started"}
    stopping = {"ready": False, "reason": "the server is being stopped"}
    with ReadinessServer("127.0.0.1", 0, snapshots.pop) as readiness:
        assert readiness.answer("/ready") == (503, starting)
        assert readiness.answer("/ready") == (200, {"ready": True})
        readiness.set_stopping()
        assert readiness.answer("/ready/a") == (503, stopping)
        assert readiness.answer("/live") == (200, {"live": True})


@pytest.mark.parametrize("data", [b"", b"\r\n\r\n", b"\0" * 1000, b"POST /ready HTTP/1.0\r\n\r\n"])
def test_malformed_requests_are_harmless(
    data: bytes, running: ReadinessServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next probe is answered, and nothing is printed."""
    with _connect(running) as connection:
        connection.sendall(data)
        assert _get(running, method="HEAD") == (200, b"")
    assert capfd.readouterr().err == ""


def _open(readiness: ReadinessServer, stack: contextlib.ExitStack, data: bytes) -> socket.socket:
    """Open a connection, which the server may close at any time, and send something."""
    connection = stack.enter_context(_connect(readiness))
    with contextlib.suppress(OSError):
        connection.sendall(data)
    return connection


def _assert_closed(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""


def _until_threads(number: int) -> None:
    while threading.active_count() > number:
        time.sleep(0.01)


def test_silent_clients_lose_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit, the oldest connections are closed; probes in between are answered."""
    monkeypatch.setattr(_readiness, "_MAX_CONNECTIONS", 4)
    before = threading.active_count()
    with _readiness_server() as readiness, contextlib.ExitStack() as stack:
        opened = []
        for _ in range(10):
            opened += [_open(readiness, stack, b"GET /re") for _ in range(3)]
            assert _get(readiness)[0] == 200
            _until_threads(before + 1 + 4)
        for connection in opened[:-4]:
            _assert_closed(connection)


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed, and later ones are answered."""
    monkeypatch.setattr(_readiness, "_MAX_CONNECTIONS", 1)

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with _readiness_server() as readiness:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            for _ in range(3):
                with _connect(readiness) as connection:
                    _assert_closed(connection)
        assert _get(readiness)[0] == 200


def test_names_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that does not answer delays no start."""

    def look_up(name: str = "") -> str:
        raise AssertionError(name)

    monkeypatch.setattr(socket, "getfqdn", look_up)
    with _readiness_server() as readiness:
        assert _get(readiness)[0] == 200
