"""A running tritonserver asked over gRPC or HTTP, and requests sent to it as cheaply as can be.

A load generator shares the machine with the server, so what it costs is taken from the server.
Hence one thread with asyncio, and requests that are put into bytes once: gRPC's channel sends those
as they are, and no answer is decoded. Measured on two cores against a model that adds 16 numbers
(median of five turns: answers a second, and microseconds of this process' CPU for each), with 1, 8
and 32 requests outstanding:

    this, gRPC                    1.3k 286    4.2k 146    6.0k 107
    tritonclient.grpc.aio         1.3k 325    2.8k 173    4.8k 120
    tritonclient.grpc, threads    1.5k 251    3.8k 153    4.5k 168
    this, HTTP (aiohttp)          1.3k 290    2.7k 150    5.1k 142
    tritonclient.http, threads    1.6k 241    4.1k 142    3.8k 216

tritonclient's callbacks (`async_infer`) came to 0.5 to 0.95 of the threads. The machine was shared:
the order holds, the figures drift. perf_analyzer, in C++, reached 1.8, 1.3 and 1.3 times this
client's answers while others kept both cores busy.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from torch_py_backend.errors import ServerError
from torch_py_backend.server import tritonserver
from torch_py_backend.server.tritonserver import ModelState
from torch_py_backend.tools.load_generator import Send
from torch_py_backend.tools.payloads import Payload

PROTOCOLS = ("grpc", "http")
_TIMEOUT_S = 20.0
_INSTALL = "pip install 'torch-py-backend[bench]'"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and for which protocol."""

    protocol: str
    host: str

    def __str__(self) -> str:
        return f"{self.protocol}://{self.host}"


def address(url: str) -> Address:
    """The address in a URL.

    Raises:
        ServerError: it is not of the form grpc://host:port or http://host:port.
    """
    try:
        parts = urlsplit(url)
        complete = bool(parts.hostname and parts.port) and parts.path in ("", "/")
    except ValueError:  # a port that is no number
        complete = False
    if not complete or parts.scheme not in PROTOCOLS or parts.query:
        raise ServerError(f"'{url}' is no address; expected grpc://host:port or http://host:port.")
    return Address(parts.scheme, parts.netloc)


class Client(Protocol):
    """What both protocols offer. Used in one event loop, and closed there."""

    async def states(self) -> list[ModelState]:
        """The models of the server's repository."""

    async def config(self, model: str) -> dict[str, Any]:
        """The config of a model, completed by the server."""

    async def statistics(self, model: str) -> dict[str, Any]:
        """What Triton counted for a model since it was started."""

    def sender(self, model: str, payloads: Sequence[Payload]) -> Send:
        """What sends these requests, one after the other, again and again."""

    async def close(self) -> None:
        """Give the connections back."""


def connect(to: Address) -> Client:
    """A client for an address; nothing is sent yet.

    Raises:
        ServerError: what it needs is not installed.
    """
    try:
        return _Grpc(to) if to.protocol == "grpc" else _Http(to)
    except ImportError as error:
        raise ServerError(
            f"{error.name or error} is not installed; {_INSTALL} brings it."
        ) from None


async def ready(client: Client, model: str) -> None:
    """Return if the model can be asked.

    Raises:
        ServerError: it is unknown or not ready; the message says which.
    """
    states = await client.states()
    mine = [one for one in states if one.name == model]
    if not mine:
        known = ", ".join(sorted({one.name for one in states})) or "none"
        raise ServerError(f"the server has no model '{model}'; its models: {known}.")
    if not any(one.ready for one in mine):
        reason = mine[-1].reason.split("\n\nAt:")[0].strip() or "it was not loaded"
        raise ServerError(f"model '{model}' is not ready on the server: {reason.rstrip('.')}.")


class _Grpc:
    def __init__(self, to: Address) -> None:
        import grpc  # noqa: PLC0415  in an extra
        from google.protobuf import json_format  # noqa: PLC0415
        from tritonclient.grpc import service_pb2, service_pb2_grpc  # noqa: PLC0415

        self._address = to
        self._grpc, self._messages, self._to_json = grpc, service_pb2, json_format.MessageToDict
        unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(to.host, options=unlimited)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def states(self) -> list[ModelState]:
        answer = await self._ask("RepositoryIndex", self._messages.RepositoryIndexRequest())
        return [tritonserver.state(entry) for entry in answer.get("models", ())]

    async def config(self, model: str) -> dict[str, Any]:
        answer = await self._ask("ModelConfig", self._messages.ModelConfigRequest(name=model))
        config: dict[str, Any] = answer["config"]
        return config

    async def statistics(self, model: str) -> dict[str, Any]:
        return await self._ask("ModelStatistics", self._messages.ModelStatisticsRequest(name=model))

    async def _ask(self, method: str, message: Any) -> dict[str, Any]:
        try:
            answer = await getattr(self._stub, method)(message, timeout=_TIMEOUT_S)
        except self._grpc.RpcError as error:
            raise _refused(self._address, error.details()) from error
        found: dict[str, Any] = self._to_json(answer, preserving_proto_field_name=True)
        return found

    def sender(self, model: str, payloads: Sequence[Payload]) -> Send:
        # Without a serializer, the channel takes and gives bytes.
        infer = self._channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        following = itertools.cycle([self._request(model, one) for one in payloads])
        failure = self._grpc.RpcError

        async def send() -> None:
            try:
                await infer(next(following))
            except failure as error:
                raise ServerError(error.details()) from None

        return send

    def _request(self, model: str, payload: Payload) -> bytes:
        message = self._messages.ModelInferRequest(model_name=model)
        for name, tensor in payload.items():
            message.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.array.shape)
            message.raw_input_contents.append(tensor.encoded())
        encoded: bytes = message.SerializeToString()
        return encoded

    async def close(self) -> None:
        await self._channel.close()


class _Http:
    def __init__(self, to: Address) -> None:
        import aiohttp  # noqa: PLC0415  in an extra

        self._address = to
        self._aiohttp = aiohttp
        self._url = f"http://{to.host}/v2"
        # aiohttp's own limits are 100 connections, and five minutes.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def states(self) -> list[ModelState]:
        entries = await self._ask("POST", "/repository/index", data=b"{}")
        return [tritonserver.state(entry) for entry in entries]

    async def config(self, model: str) -> dict[str, Any]:
        config: dict[str, Any] = await self._ask("GET", f"/models/{model}/config")
        return config

    async def statistics(self, model: str) -> dict[str, Any]:
        statistics: dict[str, Any] = await self._ask("GET", f"/models/{model}/stats")
        return statistics

    async def _ask(self, method: str, path: str, **options: Any) -> Any:
        timeout = self._aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with self._session.request(
                method, self._url + path, timeout=timeout, **options
            ) as response:
                body = await response.read()
        except self._aiohttp.ClientResponseError as error:
            raise _refused(self._address, "its answer is not HTTP") from error
        except (self._aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise _refused(self._address, str(error) or "no answer in time") from error
        if response.status != 200:  # noqa: PLR2004  OK
            raise _refused(self._address, _error(response.status, body))
        try:
            return json.loads(body)
        except ValueError as error:
            raise _refused(self._address, "its answer is not JSON") from error

    def sender(self, model: str, payloads: Sequence[Payload]) -> Send:
        url = f"{self._url}/models/{model}/infer"
        following = itertools.cycle([_http_request(one) for one in payloads])
        post = self._session.post

        async def send() -> None:
            headers, body = next(following)
            async with post(url, data=body, headers=headers) as response:
                answer = await response.read()
            if response.status != 200:  # noqa: PLR2004  OK
                raise ServerError(_error(response.status, answer))

        return send

    async def close(self) -> None:
        await self._session.close()


def _http_request(payload: Payload) -> tuple[Mapping[str, str], bytes]:
    """Triton's binary protocol: JSON, and behind it the tensors' bytes."""
    encoded = [tensor.encoded() for tensor in payload.values()]
    header = {
        "inputs": [
            {
                "name": name,
                "datatype": tensor.datatype,
                "shape": tensor.array.shape,
                "parameters": {"binary_data_size": len(data)},
            }
            for (name, tensor), data in zip(payload.items(), encoded, strict=True)
        ],
        "parameters": {"binary_data_output": True},
    }
    start = json.dumps(header).encode()
    headers = {
        "Inference-Header-Content-Length": str(len(start)),
        "Content-Type": "application/octet-stream",
    }
    return headers, start + b"".join(encoded)


def _error(status: int, body: bytes) -> str:
    """What an answer with an error says; Triton's are JSON."""
    try:
        said: str = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        said = f"HTTP status {status}"
    return said


def _refused(to: Address, detail: str | None) -> ServerError:
    return ServerError(
        f"no tritonserver answers at {to}: {(detail or 'no reason is told').rstrip('.')}."
        f" Is it running, and is this its {to.protocol} port?"
    )
