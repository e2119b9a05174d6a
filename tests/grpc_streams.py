"""A client of streams: one gRPC call a request, which ends when its last response has come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import serving
import tritonclient.grpc
from streamed import Stream
from tritonclient.grpc import service_pb2, service_pb2_grpc

from torch_py_backend.server import Server

_LONGEST_S = 120


@dataclass(frozen=True)
class Client:
    """A connection to a server."""

    channel: grpc.Channel

    def ask(self, model: str, inputs: dict[str, Any], **parameters: bool) -> Any:
        """A call under way: iterate over it for `responses`, or cancel it."""
        request = service_pb2.ModelInferRequest(model_name=model)
        for tensor in serving.infer_inputs(tritonclient.grpc, inputs):
            request.inputs.append(tensor._get_tensor())
            request.raw_input_contents.append(tensor._get_content())
        for key, wanted in parameters.items():
            request.parameters[key].bool_param = wanted
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        return stub.ModelStreamInfer(iter([request]), timeout=_LONGEST_S)


def connect(server: Server) -> Client:
    return Client(grpc.insecure_channel(server.grpc_address))


def responses(call: Any) -> Iterator[dict[str, Any] | str]:
    """What comes: outputs by name, or an error's text."""
    for message in call:
        if message.error_message:
            yield message.error_message
            continue
        result = tritonclient.grpc.InferResult(message.infer_response)
        yield {one.name: result.as_numpy(one.name) for one in message.infer_response.outputs}


def check(client: Client, model: str, stream: Stream) -> None:
    stream.check(list(responses(client.ask(model, stream.inputs))))


def metric(server: Server, name: str, model: str) -> float:
    """The sum of a metric over a model's instances, as the server has it at this moment."""
    samples = serving.samples(serving.metrics(server.metrics_address))
    return sum(one.value for one in samples if (one.name, one.labels.get("model")) == (name, model))
