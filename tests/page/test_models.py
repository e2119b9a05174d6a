"""The endpoints of the page, beside a substitute of Triton that misbehaves on demand."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from openapi_spec_validator import validate

from torch_py_backend.page import models
from torch_py_backend.page.models import ModelsPage
from torch_py_backend.server import http_server, tritonserver

_KEY = "gehéim"
_CONFIGS = {
    "plain ü?": (8, False),
    "ticker": (0, True),
}


def _config(name: str) -> dict[str, Any]:
    rows, is_decoupled = _CONFIGS[name]
    kinds = ("TYPE_FP32", "TYPE_INT64", "TYPE_STRING", "TYPE_BOOL")
    entries = [
        {"name": kind, "data_type": kind, "dims": ["-1", "4"], "optional": kind == kinds[0]}
        for kind in kinds
    ]
    return {
        "name": name,
        "max_batch_size": rows,
        "input": entries,
        "output": entries[:2],
        "model_transaction_policy": {"decoupled": is_decoupled},
    }


class _Triton(BaseHTTPRequestHandler):
    """Answers a request for inference with what it got, after the seconds in its body."""

    server: _Server

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        if "stats" in self.path:
            time.sleep(self.server.pause)
            self._send({"model_stats": []})
        elif self.server.restricted and "admin-key" not in self.headers:
            self._send({"error": "This API is restricted"}, 403)
        else:
            self._send(_config("ticker" if "ticker" in self.path else "plain ü?"))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append(self.path)
        if body.isdigit():
            time.sleep(int(body))
        self._send({"headers": dict(self.headers), "size": len(body)})

    def _send(self, document: object, status: int = 200) -> None:
        text = json.dumps(document).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    pause = 0.0
    restricted = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Triton)
        self.paths: list[str] = []


class Opened:
    """A running page, its requests to the substitute of Triton, and what its buttons did."""

    def __init__(self) -> None:
        self.triton = _Server()
        threading.Thread(target=self.triton.serve_forever, daemon=True).start()
        listener = tritonserver.listen("127.0.0.1", 0)
        self.host = f"127.0.0.1:{listener.getsockname()[1]}"
        self.changes: list[tuple[str, str]] = []
        port = self.triton.server_address[1]
        page = ModelsPage(
            f"127.0.0.1:{port}",
            (port, 1),
            "admin-key",
            _KEY,
            lambda: {"problem": "", "models": {name: {"reason": ""} for name in _CONFIGS}},
            lambda _: {"artifact": "model.py"},
            lambda action, name: self.changes.append((action, name)),
        )
        self.running = http_server.run(listener, page.routes)

    def send(
        self,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        client = http.client.HTTPConnection(self.host, timeout=60)
        with contextlib.closing(client):
            origin = {"Origin": f"http://{self.host}"} if headers is None else headers
            client.request("GET" if body is None else "POST", path, body, dict(origin))
            response = client.getresponse()
            return response.status, response.read()


@pytest.fixture
def opened() -> Iterator[Opened]:
    opened = Opened()
    with opened.running:
        yield opened
    opened.triton.shutdown()
    opened.triton.server_close()


def test_the_assets_may_not_load_anything_from_elsewhere(opened: Opened) -> None:
    client = http.client.HTTPConnection(opened.host, timeout=60)
    with contextlib.closing(client):
        client.request("GET", "/")
        response = client.getresponse()
        assert b"page.js" in response.read()
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert opened.send("/../models.py")[0] == 404


def test_openapi_is_valid(opened: Opened) -> None:
    status, text = opened.send("/openapi.json")
    document = json.loads(text)
    validate(document)
    assert status == 200
    assert [*document["paths"]] == [
        "/v2/models/plain%20%C3%BC%3F/infer",
        "/v2/models/plain%20%C3%BC%3F/generate",
        "/v2/models/ticker/generate_stream",
    ]
    document = json.loads(opened.send("/openapi.json", headers={"Host": "[::1]:80"})[1])
    assert document["servers"][0]["url"].startswith("http://[::1]:")


def test_a_request_and_its_key_are_passed_on_to_triton(opened: Opened) -> None:
    """The key of the browser, never that of the server."""
    headers = {"Origin": f"http://{opened.host}", "Inference-Header-Content-Length": "2"}
    for key in ({}, {"admin-key": "mé"}):
        status, answer = opened.send("/models/plain%20%C3%BC%3F/infer", b"abc", headers | key)
        line, _, text = answer.partition(b"\n")
        sent = json.loads(text)
        assert (status, json.loads(line), sent["size"]) == (200, [200, None], 3)
        assert sent["headers"]["inference-header-content-length"] == "2"
        assert sent["headers"].get("admin-key") == key.get("admin-key")
        assert opened.triton.paths[-1] == "/v2/models/plain%20%C3%BC%3F/infer"


def test_what_triton_restricts_needs_the_key(opened: Opened) -> None:
    opened.triton.restricted = True
    key = {"admin-key": "mine"}
    status, text = opened.send("/models/ticker")
    assert status == 200
    assert json.loads(text)["config"] == {"error": "This API is restricted"}
    assert json.loads(text)["report"] == {}
    assert json.loads(opened.send("/openapi.json")[1])["paths"] == {}
    assert json.loads(opened.send("/models/ticker", headers=key)[1])["report"]
    assert json.loads(opened.send("/openapi.json", headers=key)[1])["paths"]


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1:1"])
@pytest.mark.parametrize("action", ["infer", "load"])
def test_other_sites_cannot_post(opened: Opened, origin: str | None, action: str) -> None:
    headers = {"admin-key": _KEY} | ({"Origin": origin} if origin else {})
    assert opened.send(f"/models/ticker/{action}", b"", headers)[0] == 403
    assert (opened.changes, opened.triton.paths) == ([], [])


def test_buttons_need_the_admin_key(opened: Opened) -> None:
    origin = {"Origin": f"http://{opened.host}"}
    for key, status in (("", 403), ("wrong", 403), (_KEY, 202)):
        answer = opened.send("/models/ticker/unload", b"", {**origin, "admin-key": key})
        assert answer[0] == status
    assert opened.send("/models/no/unload", b"", {**origin, "admin-key": _KEY})[0] == 404
    assert opened.changes == [("unload", "ticker")]


def test_requests_are_limited_in_size_and_number(opened: Opened) -> None:
    assert opened.send("/models/ticker/infer", bytes(1 << 20))[0] == 200
    assert opened.send("/models/ticker/infer", bytes((1 << 20) + 1))[0] == 413
    answers: list[int] = []

    def infer() -> None:
        line = opened.send("/models/ticker/infer", b"3")[1].partition(b"\n")[0]
        answers.append(json.loads(line)[0])

    threads = [threading.Thread(target=infer) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [200] * 4 + [429] * 2
    assert opened.send("/models/ticker/infer", b"0")[1].startswith(b"[200, ")


def test_statistics_that_hang_delay_no_state(opened: Opened) -> None:
    opened.triton.pause = 30.0
    status, text = opened.send("/events")
    first = text.split(b"\n\n")[0].partition(b"data: ")[2]
    assert status == 200
    assert json.loads(first)["statistics"] == {"error": "tritonserver does not answer"}
    assert json.loads(first)["models"].keys() == _CONFIGS.keys()


def test_viewers_share_what_is_collected(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand, also of those that never read; the others are served meanwhile."""
    monkeypatch.setattr(models, "_EVENTS_S", 1.0)
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            client = http.client.HTTPConnection(opened.host, timeout=60)
            stack.callback(client.close)
            with contextlib.suppress(OSError):
                client.request("GET", "/events")
        began = time.monotonic()
        assert opened.send("/events")[0] == 200
    assert len(opened.triton.paths) <= time.monotonic() - began + 20
