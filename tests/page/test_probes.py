"""The endpoints for probes: their statuses and JSON, and clients that misbehave."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from torch_py_backend.page.probes import Probes, Snapshot
from torch_py_backend.server import http_server, tritonserver

_UNKNOWN = "the parameter X is unknown and ignored"
_DOWN = "is down: no model.py"
_READY = {"ready": False, "reason": "models do not serve", "models": {"b": _DOWN}}
_MODELS = {"a": "", "\udcff": "", "b": "is down: no /srv/b/model.py", "grüße": ""}
_WARNINGS = {"a": [_UNKNOWN, "/srv/m/w.pt is unused"]}


class Probed:
    """Running probes, their address, and what the supervisor reports."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.snapshot = Snapshot(_MODELS, "", _WARNINGS)
        listener = tritonserver.listen(address, 0)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.probes = Probes(lambda: self.snapshot)
        self.running = http_server.run(listener, self.probes.routes)

    def get(self, path: str = "/live", method: str = "GET") -> tuple[int, Any]:
        client = http.client.HTTPConnection(*self.address, timeout=60)
        with contextlib.closing(client):
            client.request(method, path)
            response = client.getresponse()
            body = response.read()
            is_json = response.getheader("Content-Type") == "application/json"
            return response.status, json.loads(body or "null") if is_json else body

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=60)


@pytest.fixture
def probed() -> Iterator[Probed]:
    probed = Probed()
    with probed.running:
        yield probed


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/live", 200, {"live": True}),
        ("/ready?verbose", 503, _READY),
        ("/ready/a", 200, {"ready": True, "warnings": [_UNKNOWN, "w.pt is unused"]}),
        ("/ready/gr%C3%BC%C3%9Fe", 200, {"ready": True}),
        ("/ready/b", 503, {"ready": False, "reason": _DOWN}),
        ("/ready/x", 404, {"ready": False, "reason": "no such model should serve"}),
        ("/", 404, b"Not Found"),
    ],
)
def test_paths(path: str, status: int, body: object, probed: Probed) -> None:
    assert probed.get(path) == (status, body)


@pytest.mark.parametrize(
    ("snapshot", "reason"),
    [
        (Snapshot(_MODELS, "no answer", {}), "no answer"),
        (Snapshot({}, "starting", {}), "starting"),
    ],
)
def test_problems_of_the_whole_server(snapshot: Snapshot, reason: str, probed: Probed) -> None:
    probed.snapshot = snapshot
    for path in ("/live", "/ready", "/ready/a", "/ready/x"):
        status, body = probed.get(path)
        assert (status, body["reason"]) == (503, reason)


def test_a_server_that_stops_is_live_and_not_ready(probed: Probed) -> None:
    probed.snapshot = Snapshot({"a": ""}, "", {})
    assert probed.get("/ready") == (200, {"ready": True})
    probed.probes.stopping = True
    stopping = {"ready": False, "reason": "the server is being stopped"}
    assert probed.get("/ready/a") == (503, stopping)
    assert probed.get("/live") == (200, {"live": True})


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_port_is_free_again_although_a_client_is_connected(address: str) -> None:
    probed = Probed(address)
    with probed.running, probed.connect():
        assert probed.get("/live", "HEAD") == (200, None)
    with pytest.raises(ConnectionRefusedError):
        probed.connect()


_POST = b"POST /ready HTTP/1.1\r\nContent-Length: 9\r\n\r\n"


@pytest.mark.parametrize("data", [b"", b"\r\n\r\n", b"\0" * 1000, _POST, b"G" * 99999])
def test_malformed_requests_are_harmless(
    data: bytes, probed: Probed, capfd: pytest.CaptureFixture[str]
) -> None:
    with probed.connect() as connection:
        connection.sendall(data)
        assert probed.get() == (200, {"live": True})
    assert capfd.readouterr().err == ""


def _assert_closed(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""


def test_of_1000_silent_connections_the_oldest_are_closed(probed: Probed) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(probed.connect()) for _ in range(1000)]
        assert probed.get() == (200, {"live": True})
        for connection in connections[: -http_server._MAX_CONNECTIONS]:
            _assert_closed(connection)


def test_a_request_that_does_not_end(monkeypatch: pytest.MonkeyPatch, probed: Probed) -> None:
    monkeypatch.setattr(http_server, "_CONNECTION_S", 0.2)
    with probed.connect() as connection:
        connection.sendall(b"GET /re")
        _assert_closed(connection)
    assert probed.get() == (200, {"live": True})
