"""The endpoints for probes: statuses, and what they tell."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from torch_py_backend.errors import ServerError
from torch_py_backend.server import readiness as _readiness
from torch_py_backend.server.readiness import ReadinessServer
from torch_py_backend.server.supervision import Snapshot


def _snapshot(
    models: dict[str, str] | None = None, problem: str = "", age: float = 0.0
) -> Snapshot:
    """As it was body, a while before it is asked for; the table is older than that."""
    return Snapshot(models or {}, problem, -age)


class _Source:
    """How the models stand."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        body = snapshot or _snapshot()
        self.snapshot = replace(body, at=time.monotonic() + body.at)


_GOOD = _snapshot({"a": "", "grüße": ""})
_DOWN = _snapshot({"a": "", "b": "is down: died"})


@pytest.mark.parametrize(
    ("path", "snapshot", "lives", "status", "body"),
    [
        ("/live", _GOOD, True, 200, {"live": True}),
        ("/live", Snapshot(), True, 200, {"live": True}),
        ("/live", _GOOD, False, 503, {"live": False, "reason": "tritonserver does not answer"}),
        (
            "/live",
            _snapshot(age=100),
            True,
            503,
            {"live": False, "reason": "the models are no longer monitored"},
        ),
        ("/ready", _GOOD, True, 200, {"ready": True}),
        ("/ready?verbose", _snapshot(), True, 200, {"ready": True}),
        ("/ready", _DOWN, True, 503, {"ready": False, "models": {"b": "is down: died"}}),
        (
            "/ready",
            Snapshot(),
            True,
            503,
            {"ready": False, "models": {}, "reason": "the server is being started"},
        ),
        (
            "/ready",
            _snapshot({"a": ""}, age=100),
            True,
            503,
            {"ready": False, "models": {}, "reason": "the models are no longer monitored"},
        ),
        ("/ready/a", _DOWN, True, 200, {"ready": True}),
        ("/ready/gr%C3%BC%C3%9Fe/", _GOOD, True, 200, {"ready": True}),
        ("/ready/b", _DOWN, True, 503, {"ready": False, "reason": "is down: died"}),
        (
            "/ready/a",
            _snapshot({"a": ""}, "tritonserver does not answer"),
            True,
            503,
            {"ready": False, "reason": "tritonserver does not answer"},
        ),
        ("/ready/x", _GOOD, True, 404, {"ready": False, "reason": "no such model should serve"}),
        ("/ready/a/b", _GOOD, True, 404, {"error": "expected /live, /ready or /ready/MODEL"}),
        ("/", _GOOD, True, 404, {"error": "expected /live, /ready or /ready/MODEL"}),
        ("/live/", _GOOD, True, 200, {"live": True}),
    ],
)
def test_answers(
    path: str, snapshot: Snapshot, lives: bool, status: int, body: dict[str, Any]
) -> None:
    """Each question gets the truth, as a status and as JSON."""
    with ReadinessServer("127.0.0.1", 0, _Source(snapshot), lambda: lives) as readiness:
        client = http.client.HTTPConnection(readiness.address, timeout=60)
        client.request("GET", path)
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())) == (status, body)
        client.close()


def test_nothing_is_ready_while_it_stops() -> None:
    """A load balancer looks elsewhere before the last requests are done."""
    with ReadinessServer("127.0.0.1", 0, _Source(_GOOD), lambda: True) as readiness:
        readiness.set_stopping()
        reason = "the server is being stopped"
        assert readiness.answer("/ready") == (
            503,
            {"ready": False, "models": {}, "reason": reason},
        )
        assert readiness.answer("/ready/a") == (503, {"ready": False, "reason": reason})
        assert readiness.answer("/live") == (200, {"live": True})


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", b"\0" * 1000, b"POST /ready HTTP/1.0\r\n\r\n"])
def test_nonsense_and_silence(sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever is sent, or not, the next probe is answered and nothing is printed."""
    with ReadinessServer("127.0.0.1", 0, _Source(_GOOD), lambda: True) as readiness:
        host, _, port = readiness.address.partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(sent)
            client = http.client.HTTPConnection(readiness.address, timeout=60)
            client.request("HEAD", "/ready")
            assert client.getresponse().status == 200
            client.close()
    assert capfd.readouterr().err == ""


def _silent(readiness: ReadinessServer, count: int) -> list[socket.socket]:
    """Connections that send the beginning of a request and no more."""
    host, _, port = readiness.address.partition(":")
    opened = [socket.create_connection((host, int(port)), timeout=60) for _ in range(count)]
    for one in opened:
        with contextlib.suppress(OSError):  # it was closed
            one.sendall(b"GET /re")
    return opened


def _ask(readiness: ReadinessServer) -> int:
    client = http.client.HTTPConnection(readiness.address, timeout=60)
    client.request("GET", "/ready")
    status = client.getresponse().status
    client.close()
    return status


def test_silent_clients_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections beyond the limit cost the oldest ones; a probe in between is answered."""
    monkeypatch.setattr(_readiness, "_CONNECTIONS", 4)
    before = threading.active_count()
    with ReadinessServer("127.0.0.1", 0, _Source(_GOOD), lambda: True) as readiness:
        opened = []
        for _ in range(10):
            opened += _silent(readiness, 3)
            assert _ask(readiness) == 200
            while threading.active_count() - before > 1 + 4:
                time.sleep(0.01)
        for one in opened[:-4]:
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        for one in opened:
            one.close()


def test_threads_are_limited_while_tritonserver_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Further connections are closed, whatever those before them wait for."""
    monkeypatch.setattr(_readiness, "_CONNECTIONS", 4)
    answers = threading.Event()
    before = threading.active_count()
    with ReadinessServer("127.0.0.1", 0, _Source(_GOOD), lambda: answers.wait(60)) as readiness:
        host, _, port = readiness.address.partition(":")
        opened = []
        for _ in range(20):
            opened.append(socket.create_connection((host, int(port)), timeout=60))
            with contextlib.suppress(OSError):  # it was closed
                opened[-1].sendall(b"GET /live HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert opened[-1].recv(1) == b""
        assert threading.active_count() - before <= 1 + 2 * 4
        answers.set()
        for one in opened:
            one.close()
        while threading.active_count() - before > 1:
            time.sleep(0.01)
        assert _ask(readiness) == 200


def test_a_port_that_is_taken() -> None:
    """It is body with the flag that chooses another."""
    with (
        ReadinessServer("127.0.0.1", 0, _Source(), lambda: True) as first,
        pytest.raises(ServerError, match=r"--health-port \d+ on 127.0.0.1 cannot be listened on"),
    ):
        ReadinessServer("127.0.0.1", int(first.address.partition(":")[2]), _Source(), lambda: True)
