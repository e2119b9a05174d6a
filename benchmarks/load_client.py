"""A client of a tritonserver over gRPC or HTTP that costs little CPU time.

A load generator shares the machine with the server and takes CPU time from it. Hence it is one
thread with asyncio, which encodes each request once (gRPC's channel sends bytes as they are) and
decodes no response. Measured on two cores of a shared machine with a model that adds 16 numbers
(median of five turns: responses per second, and microseconds of CPU time for each), with 1, 8 and
32 requests outstanding:

    this, gRPC                    1.3k 286    4.2k 146    6.0k 107
    tritonclient.grpc.aio         1.3k 325    2.8k 173    4.8k 120
    tritonclient.grpc, threads    1.5k 251    3.8k 153    4.5k 168
    this, HTTP (aiohttp)          1.3k 290    2.7k 150    5.1k 142
    tritonclient.http, threads    1.6k 241    4.1k 142    3.8k 216
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from benchmarks.load_generator import Send
from benchmarks.payloads import Payload
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import ToolError
from torch_py_backend.server import client as triton_client
from torch_py_backend.server.client import ModelState

if TYPE_CHECKING:
    import aiohttp
    import grpc.aio

HttpRequest: TypeAlias = tuple[Mapping[str, str], bytes]
"""Headers and body."""
PROTOCOLS = ("grpc", "http")
_TIMEOUT_S = 20.0
_INSTALL = "pip install 'tritonclient[all]'"


@dataclass(frozen=True, slots=True)
class Address:
    """A server's protocol, host and port."""

    protocol: str
    host: str

    def __str__(self) -> str:
        return f"{self.protocol}://{self.host}"


def address(url: str) -> Address:
    """Return the address in a URL.

    Raises:
        ToolError: the URL is not of the form grpc://host:port or http://host:port.
    """
    try:
        parts = urlsplit(url)
        complete = bool(parts.hostname and parts.port) and parts.path in ("", "/")
    except ValueError:  # the port is not a number
        complete = False
    if not complete or parts.scheme not in PROTOCOLS or parts.query:
        raise ToolError(
            f"'{url}' is not an address; expected grpc://host:port or http://host:port."
        )
    return Address(parts.scheme, parts.netloc)


class Client:
    """A client of one address, to be used and closed in one event loop.

    Raises:
        ToolError: a package is not installed.
    """

    def __init__(self, to: Address) -> None:
        self._address = to
        try:
            triton = importlib.import_module(f"tritonclient.{to.protocol}.aio")
            self._triton = triton.InferenceServerClient(to.host)
            # tritonclient prepares each request anew, and decodes each response.
            self._connection = channel(to.host) if to.protocol == "grpc" else session()
        except (ImportError, RuntimeError) as error:  # tritonclient raises the latter
            reason = getattr(error, "name", None) or error
            raise ToolError(f"{reason} is not installed; {_INSTALL} brings it.") from None

    def sender(self, model: str, payloads: Sequence[Payload]) -> Send:
        """Return a function that sends the next of these requests, in a cycle."""
        if self._address.protocol == "grpc":
            return grpc_sender(self._connection, model, payloads)
        url = f"http://{self._address.host}/v2/models/{model}/infer"
        return http_sender(self._connection, url, [*map(http_request, payloads)])

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connection.close()
        await self._triton.close()

    async def states(self) -> dict[str, ModelState]:
        """Return the models of the server's repository by name."""
        index = await self._reply("get_model_repository_index")
        entries = index.get("models", ()) if isinstance(index, dict) else index
        return triton_client.states(entries)

    async def config(self, model: str) -> JsonObject:
        """Return the config of a model, as the server completed it."""
        reply: JsonObject = await self._reply("get_model_config", model)
        config: JsonObject = reply.get("config", reply)
        return config

    async def statistics(self, model: str) -> JsonObject:
        """Return Triton's statistics of a model since the server's start."""
        statistics: JsonObject = await self._reply("get_inference_statistics", model)
        return statistics

    async def _reply(self, method: str, *arguments: str) -> Any:
        options = {"as_json": True} if self._address.protocol == "grpc" else {}
        try:
            call = getattr(self._triton, method)
            return await asyncio.wait_for(call(*arguments, **options), _TIMEOUT_S)
        except Exception as error:  # of tritonclient, aiohttp or a JSON parser
            message = getattr(error, "message", None)  # a method of tritonclient's exception
            text = str(message() if callable(message) else error).strip() or "no answer in time"
            reason = text.splitlines()[0].rstrip(".")
            raise ToolError(
                f"no tritonserver answers at {self._address}: {reason}."
                f" Is it running, and is this its {self._address.protocol} port?"
            ) from error


async def require_ready(client: Client, model: str) -> None:
    """Raise unless the model is ready.

    Raises:
        ToolError: the model is unknown or not ready.
    """
    states = await client.states()
    state = states.get(model)
    if state is None:
        names = ", ".join(sorted(states)) or "none"
        raise ToolError(f"the server has no model '{model}'; its models: {names}.")
    if not state.ready:
        reason = state.reason or "it was not loaded"
        raise ToolError(f"model '{model}' is not ready on the server: {reason}.")


def channel(host: str) -> grpc.aio.Channel:
    """Return a gRPC channel without limits of the size of messages."""
    import grpc.aio  # noqa: PLC0415  in an extra

    lengths = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
    return grpc.aio.insecure_channel(host, options=[(length, -1) for length in lengths])


def grpc_sender(channel: grpc.aio.Channel, model: str, payloads: Sequence[Payload]) -> Send:
    """Return a function that sends the next of these requests, in a cycle."""
    import grpc  # noqa: PLC0415  in an extra
    from tritonclient.grpc import service_pb2  # noqa: PLC0415  in an extra

    messages = []
    for payload in payloads:
        message = service_pb2.ModelInferRequest(model_name=model)
        for name, tensor in payload.items():
            message.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.array.shape)
            message.raw_input_contents.append(tensor.encoded())
        messages.append(message.SerializeToString())
    cycle = itertools.cycle(messages)
    # Without a serializer, the channel sends and returns bytes.
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

    async def send() -> None:
        try:
            await infer(next(cycle))
        except grpc.RpcError as error:
            raise ToolError(error.details()) from None

    return send


def session() -> aiohttp.ClientSession:
    """Return an HTTP session without aiohttp's limits (100 connections, five minutes)."""
    import aiohttp  # noqa: PLC0415  in an extra

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


def http_sender(session: aiohttp.ClientSession, url: str, requests: Sequence[HttpRequest]) -> Send:
    """Return a function that posts the next of these requests, in a cycle."""
    cycle = itertools.cycle(requests)

    async def send() -> None:
        headers, body = next(cycle)
        async with session.post(url, data=body, headers=headers) as response:
            content = await response.read()
        if response.status != HTTPStatus.OK:
            try:
                message = json.loads(content)["error"]  # of Triton
            except (ValueError, KeyError, TypeError):
                message = f"HTTP status {response.status}: {content[:200]!r}"
            raise ToolError(message)

    return send


def http_request(payload: Payload) -> HttpRequest:
    """Return a request of Triton's binary protocol: JSON, followed by the tensors' bytes."""
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
