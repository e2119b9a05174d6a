"""The clients of `bench`: addresses, errors of servers, requests as bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from torch_py_backend.errors import ServerError
from torch_py_backend.server.model_status import ModelState
from torch_py_backend.tools import load_client
from torch_py_backend.tools.load_client import Address, Client
from torch_py_backend.tools.payloads import Tensor

_Ask: TypeAlias = Callable[[Client], Awaitable[None]]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("grpc://[::1]:8001", Address("grpc", "[::1]:8001")),
        ("http://10.0.0.1:8000/", Address("http", "10.0.0.1:8000")),
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


async def _states(client: Client) -> None:
    await client.states()


async def _infer(client: Client) -> None:
    await client.sender("m", [{"x": Tensor("FP32", np.ones((1, 2), np.float32))}])()


async def _connected(protocol: str, port: int, ask: _Ask) -> None:
    client = load_client.Client(Address(protocol, f"127.0.0.1:{port}"))
    async with contextlib.aclosing(client):
        await ask(client)


def _ask(protocol: str, answer: bytes, ask: _Ask) -> None:
    """Let a client ask a server that answers everything with these bytes."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        with contextlib.closing(writer):
            await reader.read()  # until the client hangs up

    async def run() -> None:
        async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
            await _connected(protocol, server.sockets[0].getsockname()[1], ask)

    asyncio.run(run())


def _http(status: int, body: str) -> bytes:
    return f"HTTP/1.1 {status} Status\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    ("protocol", "answer", "says"),
    [
        ("http", _http(404, "<html>"), "no tritonserver answers at http://"),
        ("http", _http(400, '{"error": "not allowed"}'), r"127.0.0.1:\d+: not allowed\. Is it"),
        ("http", _http(200, "hello"), "no tritonserver answers at http://"),
        ("http", b"SSH-2.0-OpenSSH\r\n\r\n", r"answers at http://127.0.0.1:\d+: \S"),
        ("grpc", _http(200, ""), "no tritonserver answers at grpc://"),
    ],
    ids=["status", "error", "text", "not-http", "other-protocol"],
)
def test_not_a_tritonserver(protocol: str, answer: bytes, says: str) -> None:
    """A server that is no tritonserver is an error with its address."""
    with pytest.raises(ServerError, match=says):
        _ask(protocol, answer, _states)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (_http(400, '{"error": "too many"}'), "^too many$"),
        (_http(502, "<html>"), "^HTTP status 502: b'<html>'$"),
    ],
)
def test_a_failed_request(answer: bytes, says: str) -> None:
    """A request that is refused raises an error with Triton's message, else with the status."""
    with pytest.raises(ServerError, match=says):
        _ask("http", answer, _infer)


@pytest.mark.parametrize("protocol", load_client.PROTOCOLS)
def test_no_server_listens(protocol: str) -> None:
    """An unreachable server is an error of one line with its address."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        says = f"answers at {protocol}://127.0.0.1:{port}: "
        with pytest.raises(ServerError, match=says) as refusal:
            asyncio.run(_connected(protocol, port, _states))
    assert "\n" not in str(refusal.value)


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
    [("grpc", "grpc"), ("http", "tritonclient.http.aio")],
)
def test_a_missing_package(protocol: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not installed is named, with the command that installs it."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ServerError, match=r"pip install 'torch-py-backend\[bench\]' brings it"):
        load_client.Client(Address(protocol, "127.0.0.1:1"))
