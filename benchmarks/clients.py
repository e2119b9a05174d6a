"""Requests to whatever is served: Triton's protocols, or bytes and JSON over plain HTTP.

Each request is put into bytes once, and no answer is decoded while a load lasts: the client shares
the machine with the server.
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http

from benchmarks.models import MODELS, Model
from benchmarks.peers import wire
from torch_py_backend.errors import ServerError
from torch_py_backend.tools import load_client
from torch_py_backend.tools.load_generator import Send
from torch_py_backend.tools.payloads import Payload, Tensor

_TRITON = {"grpc": tritonclient.grpc, "http": tritonclient.http}
Statistics = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Endpoint:
    """Where a model of the comparison is served.

    Attributes:
        model: its name in the comparison.
        protocol: `grpc` or `http` for Triton's, `bytes` or `json` for a POST of one request.
        host: host and port.
        served: the name of the model there; for a POST, the path.
        counts: whether the server has Triton's statistics.
    """

    model: str
    protocol: str
    host: str
    served: str
    counts: bool = False


def answer(endpoint: Endpoint) -> npt.NDArray[Any]:
    """The example's answer, without the batch dimension."""
    model = MODELS[endpoint.model]
    if endpoint.protocol in _TRITON:
        return _triton_answer(endpoint, model)
    return _post_answer(endpoint, model)


def _triton_answer(endpoint: Endpoint, model: Model) -> npt.NDArray[Any]:
    module = _TRITON[endpoint.protocol]
    inputs = []
    for name, tensor in _payload(model).items():
        sent = module.InferInput(name, tensor.array.shape, tensor.datatype)
        inputs.append(sent.set_data_from_numpy(tensor.array))
    with contextlib.closing(module.InferenceServerClient(endpoint.host)) as connection:
        result = connection.infer(endpoint.served, inputs)
    rows: npt.NDArray[Any] = result.as_numpy(model.output.name)
    row: npt.NDArray[Any] = rows[0]
    return row


def _payload(model: Model) -> Payload:
    pairs = zip(model.inputs, model.example(), strict=True)
    return {one.name: Tensor(one.dtype, tensor[None].numpy()) for one, tensor in pairs}


def _post_answer(endpoint: Endpoint, model: Model) -> npt.NDArray[Any]:
    headers, body = _post(endpoint.protocol, model)
    request = urllib.request.Request(_url(endpoint), body, dict(headers))  # noqa: S310  http, local
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310  http, local
        content: bytes = response.read()
    if endpoint.protocol == "json":
        return np.array(json.loads(content)[0], wire.NUMPY_TYPES[model.output.dtype])
    return wire.answer(model, content)


def _post(protocol: str, model: Model) -> tuple[Mapping[str, str], bytes]:
    """Headers and body of a request."""
    if protocol == "bytes":
        return {"Content-Type": "application/octet-stream"}, wire.body(model)
    row = [value for tensor in model.example() for value in tensor.flatten().tolist()]
    return {"Content-Type": "application/json"}, json.dumps({"rows": [row]}).encode()


def _url(endpoint: Endpoint) -> str:
    return f"http://{endpoint.host}/{endpoint.served}"


@contextlib.asynccontextmanager
async def connected(endpoint: Endpoint) -> AsyncIterator[tuple[Send, Statistics | None]]:
    """What sends the example, and what asks for Triton's statistics where the server has them."""
    model = MODELS[endpoint.model]
    if endpoint.protocol in _TRITON:
        connection = load_client.connect(load_client.Address(endpoint.protocol, endpoint.host))
        send = connection.sender(endpoint.served, [_payload(model)])
        statistics = partial(connection.statistics, endpoint.served) if endpoint.counts else None
        try:
            yield send, statistics
        finally:
            await connection.close()
        return
    # As many connections as requests, and no time limit: as the client of Triton's HTTP has it.
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        yield _poster(session, endpoint, model), None


def _poster(session: aiohttp.ClientSession, endpoint: Endpoint, model: Model) -> Send:
    url = _url(endpoint)
    headers, body = _post(endpoint.protocol, model)

    async def send() -> None:
        async with session.post(url, data=body, headers=headers) as response:
            said = await response.read()
        if response.status != HTTPStatus.OK:
            raise ServerError(f"{url} answered {response.status}: {said[:200]!r}.")

    return send
