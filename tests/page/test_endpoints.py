"""The endpoints of probes and page, beside a substitute of Triton, and clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from openapi_spec_validator import validate
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from torch_py_backend.page import models
from torch_py_backend.page.models import ModelsPage
from torch_py_backend.page.probes import Probes, Snapshot
from torch_py_backend.server import http_server, tritonserver

_KEY = "gehéim"
_PLAIN = "plain ü?"
_QUOTED = "plain%20%C3%BC%3F"
_KINDS = ("TYPE_FP32", "TYPE_INT64", "TYPE_STRING", "TYPE_BOOL")
_ENTRIES = [
    {"name": kind, "data_type": kind, "dims": ["-1", "4"], "optional": kind == _KINDS[0]}
    for kind in _KINDS
]
_CONFIGS = {
    name: {
        "name": name,
        "max_batch_size": rows,
        "input": _ENTRIES,
        "output": _ENTRIES[:2],
        "model_transaction_policy": {"decoupled": rows == 0},
    }
    for name, rows in ((_PLAIN, 8), ("ticker", 0))
}
_UNKNOWN = "the parameter X is unknown and ignored"
_DOWN = "is down: no model.py"
_READY = {"ready": False, "reason": "models do not serve", "models": {"b": _DOWN}}
_MODELS = {"a": "", "\udcff": "", "b": "is down: no /srv/b/model.py", "grüße": ""}
_WARNINGS = {"a": [_UNKNOWN, "/srv/m/w.pt is unused"]}


class _Triton:
    """Answers a request for inference with what it got, and some only while it `answers`."""

    def __init__(self) -> None:
        listener = tritonserver.listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.answers, self.restricted = True, False
        self.paths: list[str] = []
        route = Route("/{path:path}", self._answer, methods=["GET", "POST"])
        self.running = http_server.run(listener, [route])

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        self.paths.append(request.scope["raw_path"].decode())
        waits = body == b"waits" or "stats" in self.paths[-1]
        while waits and not self.answers:  # noqa: ASYNC110  another thread sets it
            await asyncio.sleep(0.01)
        if request.method == "POST":
            return JSONResponse({"headers": dict(request.headers), "size": len(body)})
        if self.restricted and "admin-key" not in request.headers:
            return JSONResponse({"error": "This API is restricted"}, 403)
        return JSONResponse(_CONFIGS["ticker" if "ticker" in self.paths[-1] else _PLAIN])


class Opened:
    """Running endpoints, what the supervisor reports to them, and what the page's buttons did."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.triton = _Triton()
        listener = tritonserver.listen(address, 0)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.origin = {"Origin": f"http://{address}:{self.address[1]}"}
        self.changes: list[tuple[str, str]] = []
        self.page = ModelsPage(
            f"127.0.0.1:{self.triton.port}",
            (self.triton.port, 1),
            "admin-key",
            _KEY,
            lambda: {"problem": "", "models": {name: {"reason": ""} for name in _CONFIGS}},
            lambda _: {"artifact": "model.py"},
            lambda action, name: self.changes.append((action, name)),
        )
        self.probes = Probes(lambda: self.snapshot)
        self.running = http_server.run(listener, [*self.probes.routes, *self.page.routes])
        self.reset()

    def reset(self) -> None:
        self.snapshot = Snapshot(_MODELS, "", _WARNINGS)
        self.probes.stopping = self.triton.restricted = False
        self.triton.answers = True
        self.triton.paths.clear()
        self.changes.clear()
        self.page._due = 0.0

    def ask(
        self,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        method: str = "",
    ) -> tuple[int, Any]:
        """Send a GET, or a POST with a body, by default from the page; read JSON."""
        client = http.client.HTTPConnection(*self.address, timeout=60)
        with contextlib.closing(client):
            sent = dict(self.origin if headers is None else headers)
            client.request(method or ("GET" if body is None else "POST"), path, body, sent)
            response = client.getresponse()
            answer = response.read()
            is_json = response.getheader("Content-Type") == "application/json"
            return response.status, json.loads(answer or "null") if is_json else answer

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=60)


@pytest.fixture(scope="module")
def running() -> Iterator[Opened]:
    opened = Opened()
    with opened.triton.running, opened.running:
        yield opened


@pytest.fixture
def opened(running: Opened) -> Opened:
    running.reset()
    return running


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/live", 200, {"live": True}),
        ("/ready?verbose", 503, _READY),
        ("/ready/a", 200, {"ready": True, "warnings": [_UNKNOWN, "w.pt is unused"]}),
        ("/ready/gr%C3%BC%C3%9Fe", 200, {"ready": True}),
        ("/ready/b", 503, {"ready": False, "reason": _DOWN}),
        ("/ready/x", 404, {"ready": False, "reason": "no such model should serve"}),
        ("/../models.py", 404, b"Not Found"),
    ],
)
def test_paths(path: str, status: int, body: object, opened: Opened) -> None:
    assert opened.ask(path) == (status, body)


@pytest.mark.parametrize("models", [_MODELS, {}])
def test_problems_of_the_whole_server(models: Mapping[str, str], opened: Opened) -> None:
    opened.snapshot = Snapshot(models, "no answer", {})
    for path in ("/live", "/ready", "/ready/a", "/ready/x"):
        status, body = opened.ask(path)
        assert (status, body["reason"]) == (503, "no answer")


def test_a_server_that_stops_is_live_and_not_ready(opened: Opened) -> None:
    opened.snapshot = Snapshot({"a": ""}, "", {})
    assert opened.ask("/ready") == (200, {"ready": True})
    opened.probes.stopping = True
    stopping = {"ready": False, "reason": "the server is being stopped"}
    assert opened.ask("/ready/a") == (503, stopping)
    assert opened.ask("/live") == (200, {"live": True})


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_port_is_free_again_although_a_client_is_connected(address: str) -> None:
    opened = Opened(address)
    with opened.triton.running, opened.running, opened.connect():
        assert opened.ask("/live", method="HEAD") == (200, None)
    with pytest.raises(ConnectionRefusedError):
        opened.connect()


_POST = b"POST /ready HTTP/1.1\r\nContent-Length: 9\r\n\r\n"


@pytest.mark.parametrize("data", [b"", b"\r\n\r\n", b"\0" * 1000, _POST, b"G" * 99999])
def test_malformed_requests_are_harmless(
    data: bytes, opened: Opened, capfd: pytest.CaptureFixture[str]
) -> None:
    with opened.connect() as connection:
        connection.sendall(data)
        assert opened.ask("/live") == (200, {"live": True})
    assert capfd.readouterr().err == ""


def _assert_closed(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""


def test_of_many_silent_connections_the_oldest_are_closed(opened: Opened) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(opened.connect()) for _ in range(300)]
        assert opened.ask("/live") == (200, {"live": True})
        for connection in connections[: -http_server._MAX_CONNECTIONS]:
            _assert_closed(connection)


def test_a_request_that_does_not_end(monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    monkeypatch.setattr(http_server, "_CONNECTION_S", 0.2)
    with opened.connect() as connection:
        connection.sendall(b"GET /re")
        _assert_closed(connection)
    assert opened.ask("/live") == (200, {"live": True})


def test_the_assets_may_not_load_anything_from_elsewhere(opened: Opened) -> None:
    with urllib.request.urlopen(opened.origin["Origin"]) as response:
        assert b"page.js" in response.read()
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy


def test_openapi_is_valid(opened: Opened) -> None:
    status, document = opened.ask("/openapi.json")
    validate(document)
    assert status == 200
    assert [*document["paths"]] == [
        f"/v2/models/{_QUOTED}/infer",
        f"/v2/models/{_QUOTED}/generate",
        "/v2/models/ticker/generate_stream",
    ]
    _, document = opened.ask("/openapi.json", headers={"Host": "[::1]:80"})
    assert document["servers"][0]["url"].startswith("http://[::1]:")


def test_a_request_and_its_key_are_passed_on_to_triton(opened: Opened) -> None:
    """The key of the browser, never that of the server."""
    headers = opened.origin | {"Inference-Header-Content-Length": "2"}
    for key in ({}, {"admin-key": "mé"}):
        status, answer = opened.ask(f"/models/{_QUOTED}/infer", b"abc", headers | key)
        line, _, text = answer.partition(b"\n")
        sent = json.loads(text)
        assert (status, json.loads(line), sent["size"]) == (200, [200, None], 3)
        assert sent["headers"]["inference-header-content-length"] == "2"
        assert sent["headers"].get("admin-key") == key.get("admin-key")
        assert opened.triton.paths[-1] == f"/v2/models/{_QUOTED}/infer"


def test_what_triton_restricts_needs_the_key(opened: Opened) -> None:
    opened.triton.restricted = True
    key = {"admin-key": "mine"}
    status, details = opened.ask("/models/ticker")
    assert status == 200
    assert details["config"] == {"error": "This API is restricted"}
    assert details["report"] == {}
    assert opened.ask("/openapi.json")[1]["paths"] == {}
    assert opened.ask("/models/ticker", headers=key)[1]["report"]
    assert opened.ask("/openapi.json", headers=key)[1]["paths"]


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1:1"])
@pytest.mark.parametrize("action", ["infer", "load"])
def test_other_sites_cannot_post(opened: Opened, origin: str | None, action: str) -> None:
    headers = {"admin-key": _KEY} | ({"Origin": origin} if origin else {})
    assert opened.ask(f"/models/ticker/{action}", b"", headers)[0] == 403
    assert (opened.changes, opened.triton.paths) == ([], [])


@pytest.mark.parametrize(
    ("model", "key", "status"),
    [("ticker", "", 403), ("ticker", "wrong", 403), ("ticker", _KEY, 202), ("no", _KEY, 404)],
)
def test_buttons_need_the_admin_key(model: str, key: str, status: int, opened: Opened) -> None:
    headers = opened.origin | {"admin-key": key}
    assert opened.ask(f"/models/{model}/unload", b"", headers)[0] == status
    assert opened.changes == ([("unload", "ticker")] if status == 202 else [])


def test_requests_are_limited_in_size_and_number(opened: Opened) -> None:
    assert opened.ask("/models/ticker/infer", bytes(1 << 20))[0] == 200
    assert opened.ask("/models/ticker/infer", bytes((1 << 20) + 1))[0] == 413
    opened.triton.answers = False
    answers: list[int] = []

    def infer() -> None:
        line = opened.ask("/models/ticker/infer", b"waits")[1].partition(b"\n")[0]
        answers.append(json.loads(line)[0])

    threads = [threading.Thread(target=infer) for _ in range(6)]
    for thread in threads:
        thread.start()
    while len(answers) < 2:
        time.sleep(0.01)
    opened.triton.answers = True
    for thread in threads:
        thread.join()
    assert answers == [429] * 2 + [200] * 4
    assert opened.ask("/models/ticker/infer", b"")[1].startswith(b"[200, ")


def test_statistics_that_hang_delay_no_state(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_EVENTS_S", 0.0)
    monkeypatch.setattr(models, "_GET_S", 0.2)
    opened.triton.answers = False
    status, text = opened.ask("/events")
    state = json.loads(text.partition(b"data: ")[2])
    assert status == 200
    assert state["statistics"] == {"error": "tritonserver does not answer"}
    assert state["models"].keys() == _CONFIGS.keys()


def test_viewers_share_what_is_collected(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many, also of those that never read; the others are served meanwhile."""
    monkeypatch.setattr(models, "_EVENTS_S", 1.0)
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            client = http.client.HTTPConnection(*opened.address, timeout=60)
            stack.callback(client.close)
            with contextlib.suppress(OSError):
                client.request("GET", "/events")
        began = time.monotonic()
        assert opened.ask("/events")[0] == 200
    assert len(opened.triton.paths) <= time.monotonic() - began + 20
