"""The clients of `bench`: addresses, errors of servers, requests as bytes."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from torch_py_backend.errors import ServerError
from torch_py_backend.server.tritonserver import ModelState
from torch_py_backend.tools import load_client
from torch_py_backend.tools.load_client import Address
from torch_py_backend.tools.payloads import Tensor


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("grpc://localhost:8001", Address("grpc", "localhost:8001")),
        ("http://10.0.0.1:8000/", Address("http", "10.0.0.1:8000")),
        ("grpc://[::1]:8001", Address("grpc", "[::1]:8001")),
    ],
)
def test_address(url: str, expected: Address) -> None:
    """An address has the protocol and host of its URL, and prints as the URL."""
    assert load_client.address(url) == expected
    assert str(expected) == url.rstrip("/")


@pytest.mark.parametrize(
    "url", ["localhost:8001", "grpc://h", "https://h:8000", "http://h:port", "http://h:8000/v2"]
)
def test_invalid_addresses(url: str) -> None:
    """An invalid URL is an error with the expected form."""
    with pytest.raises(ServerError, match="expected grpc://host:port or http://host:port"):
        load_client.address(url)


class _StubClient:
    """A client whose server has these models."""

    def __init__(self, *states: ModelState) -> None:
        self._states = list(states)

    async def states(self) -> list[ModelState]:
        return self._states


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ([], "has no model 'm'; its models: none"),
        ([ModelState("b", "1", True, ""), ModelState("a", "1", True, "")], "its models: a, b"),
        ([ModelState("m", "1", False, "it broke.\n\nAt: x")], "not ready on the server: it broke."),
        ([ModelState("m", "", False, "")], "not ready on the server: it was not loaded."),
    ],
    ids=["none", "others", "failed", "unloaded"],
)
def test_models_that_are_not_ready(states: list[ModelState], says: str) -> None:
    """An unknown model and one that is not ready are different errors, with the reason."""
    client: Any = _StubClient(*states)
    with pytest.raises(ServerError) as refusal:
        asyncio.run(load_client.require_ready(client, "m"))
    assert str(refusal.value).endswith((says, f"{says}."))


def test_a_ready_version_suffices() -> None:
    """A model is ready if one of its versions is."""
    client: Any = _StubClient(ModelState("m", "1", False, "old"), ModelState("m", "2", True, ""))
    asyncio.run(load_client.require_ready(client, "m"))


async def _states(protocol: str, port: int) -> None:
    client = load_client.connect(Address(protocol, f"127.0.0.1:{port}"))
    try:
        await client.states()
    finally:
        await client.aclose()


@pytest.mark.parametrize("protocol", load_client.PROTOCOLS)
def test_no_server_listens(protocol: str) -> None:
    """An unreachable server is an error of one line with its address."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        says = f"answers at {protocol}://127.0.0.1:{port}: "
        with pytest.raises(ServerError, match=says) as refusal:
            asyncio.run(_states(protocol, port))
    assert "\n" not in str(refusal.value)


@contextmanager
def _http_server(status: int, body: bytes) -> Iterator[int]:
    """Run a server that sends the same response to every request; yield its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("protocol", "status", "body", "says"),
    [
        ("http", 404, b"<html>", "no tritonserver answers at http://"),
        ("http", 400, b'{"error": "not allowed"}', "not allowed"),
        ("http", 200, b"hello", "no tritonserver answers at http://"),
        ("grpc", 200, b"", "no tritonserver answers at grpc://"),
    ],
    ids=["status", "error", "text", "other-protocol"],
)
def test_not_a_tritonserver(protocol: str, status: int, body: bytes, says: str) -> None:
    """A server that is no tritonserver is an error with its address."""
    with _http_server(status, body) as port, pytest.raises(ServerError, match=says):
        asyncio.run(_states(protocol, port))


def test_an_answer_in_another_protocol() -> None:
    """An answer that is not HTTP is an error with the address."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            await _states("http", server.sockets[0].getsockname()[1])

    with pytest.raises(ServerError, match=r"no tritonserver answers at http://127.0.0.1:\d+: \S"):
        asyncio.run(ask())


def test_a_failed_request_has_tritons_message() -> None:
    """A request that Triton refuses raises an error with its message."""

    async def infer(port: int) -> None:
        client = load_client.connect(Address("http", f"127.0.0.1:{port}"))
        payload = {"x": Tensor("FP32", np.ones((1, 2), np.float32))}
        try:
            await client.sender("m", [payload])()
        finally:
            await client.aclose()

    with (
        _http_server(400, b'{"error": "too many"}') as port,
        pytest.raises(ServerError, match=r"^too many$"),
    ):
        asyncio.run(infer(port))


def test_an_encoded_request() -> None:
    """In Triton's binary protocol, a header has the length of the JSON before the tensors."""
    headers, body = load_client.http_request({"x": Tensor("FP32", np.ones((1, 2), np.float32))})
    start = int(headers["Inference-Header-Content-Length"])
    assert json.loads(body[:start])["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    ]
    assert body[start:] == np.ones(2, np.float32).tobytes()


@pytest.mark.parametrize(
    ("protocol", "module"),
    [("grpc", "tritonclient.grpc.aio"), ("grpc", "grpc"), ("http", "tritonclient.http.aio")],
)
def test_a_missing_package(protocol: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not installed is named, with the command that installs it."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ServerError, match=r"pip install 'torch-py-backend\[bench\]' brings it"):
        load_client.connect(Address(protocol, "127.0.0.1:1"))
