"""Requests to the servers of a comparison: Triton's protocols, bytes or JSON over plain HTTP."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import tritonclient.grpc
import tritonclient.http

from benchmarks import harness, load_client
from benchmarks.harness import Connection
from benchmarks.load_client import HttpRequest
from benchmarks.models import MODELS, Model
from benchmarks.payloads import Payload, Tensor
from benchmarks.peers import wire

_TRITON = {"grpc": tritonclient.grpc, "http": tritonclient.http}


@dataclass(frozen=True)
class Endpoint:
    """A served model of the comparison.

    Attributes:
        model: its name in the comparison.
        protocol: `grpc` or `http` for Triton's, `bytes` or `json` for a POST of one request.
        host: host and port.
        served: the name of the model on the server; for a POST, the path.
        output: the name of the output there; empty: as in the comparison.
        counts: whether the server has Triton's statistics.
    """

    model: str
    protocol: str
    host: str
    served: str
    output: str = ""
    counts: bool = False

    @property
    def url(self) -> str:
        """The URL of a POST."""
        return f"http://{self.host}/{self.served}"


def answer(endpoint: Endpoint) -> npt.NDArray[Any]:
    """Return the example's answer, without the batch dimension."""
    model = MODELS[endpoint.model]
    if endpoint.protocol in _TRITON:
        module = _TRITON[endpoint.protocol]
        inputs = []
        for name, tensor in payload(model).items():
            sent = module.InferInput(name, tensor.array.shape, tensor.datatype)
            inputs.append(sent.set_data_from_numpy(tensor.array))
        with contextlib.closing(module.InferenceServerClient(endpoint.host)) as connection:
            result = connection.infer(endpoint.served, inputs)
            rows = result.as_numpy(endpoint.output or model.output.name)
        row: npt.NDArray[Any] = rows[0]
        return row
    headers, body = _post(endpoint.protocol, model)
    request = urllib.request.Request(endpoint.url, body, dict(headers))  # noqa: S310  http, local
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310  http, local
        content: bytes = response.read()
    if endpoint.protocol == "json":
        return np.array(json.loads(content)[0], wire.NUMPY_TYPES[model.output.dtype])
    return wire.answer(model, content)


def payload(model: Model, rows: int = 1) -> Payload:
    """Return a request of the model's example, repeated in each row."""
    return {
        spec.name: Tensor(spec.dtype, torch.stack([tensor] * rows).numpy())
        for spec, tensor in zip(model.inputs, model.example(), strict=True)
    }


def _post(protocol: str, model: Model) -> HttpRequest:
    if protocol == "bytes":
        return {"Content-Type": "application/octet-stream"}, wire.body(model)
    row = [value for tensor in model.example() for value in tensor.flatten().tolist()]
    return {"Content-Type": "application/json"}, json.dumps({"rows": [row]}).encode()


@contextlib.asynccontextmanager
async def connected(endpoint: Endpoint) -> AsyncIterator[Connection]:
    """Yield functions that send the example and that return Triton's statistics, if any."""
    model = MODELS[endpoint.model]
    if endpoint.protocol in _TRITON:
        triton = harness.connected(
            endpoint.host, endpoint.protocol, endpoint.served, [payload(model)]
        )
        async with triton as (send, statistics):
            yield send, statistics if endpoint.counts else None
        return
    async with load_client.session() as session:
        request = _post(endpoint.protocol, model)
        yield load_client.http_sender(session, endpoint.url, [request]), None
