"""Malformed requests beside good ones: no crash, no hang, no error of ours but the client's.

Triton's own parser refuses most of them; the others are those that reach a model. docs/security.md
lists requests at which tritonserver 24.10 itself dies; they are not here.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import living
import numpy as np
import pytest
import scenarios
from serving import Serving, asked
from tritonclient.grpc import service_pb2, service_pb2_grpc

_X = np.arange(8, dtype=np.float32).reshape(2, 4)
_MODELS = {
    scenario.name: scenario
    for scenario in scenarios.FILES + scenarios.CALLS
    if scenario.name in ("function", "bytes_in_rows")
}
_PATH = "/v2/models/function/infer"
_TIMEOUT_S = 60
# Triton itself refuses a whole batch in which the lengths of one request's strings are wrong.
_STRINGS = "strings of wrong lengths"
_FAULTS = {500, 502, 503, "INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS"}
# What a message of our making has, or one of something that went wrong in our process.
_OURS = ("model '", "Traceback", ".py", "Stub process", "Error:", "/tmp")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("malformed")
    for scenario in _MODELS.values():
        scenario.lay_out(folder / "repository")
    with asked(folder) as running:
        yield running


def _post(
    head: bytes, tail: bytes = b"", path: str = _PATH, headers: Mapping[str, Any] | None = None
) -> bytes:
    """Return an HTTP request; `headers` come instead of those that would be right."""
    right = {
        "Host": "localhost",
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": len(head),
        "Content-Length": len(head) + len(tail),
    }
    lines = [f"{key}: {value}" for key, value in {**right, **(headers or {})}.items()]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + head + tail


def _input(**values: Any) -> bytes:
    """Return a request whose input has other values than a good one."""
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}
    return _document(inputs=[entry | values])


def _document(**values: Any) -> bytes:
    """Return a request whose JSON has other values than a good one."""
    entry = {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": _X.ravel().tolist()}
    return _post(json.dumps({"inputs": [entry]} | values).encode())


def _headers(path: str = _PATH, **headers: Any) -> bytes:
    entry = {"name": "x", "datatype": "FP32", "shape": [2, 4]}
    document = {"inputs": [entry | {"parameters": {"binary_data_size": _X.nbytes}}]}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return _post(json.dumps(document).encode(), _X.tobytes(), path, named)


def _parameters(**values: Any) -> bytes:
    return _input(parameters=values, data=[])


_MORE = {"name": "more", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
_HTTP: dict[str, bytes] = {
    "no input": _document(inputs=[]),
    "inputs of another type": _document(inputs={"x": 1}),
    "an input of another type": _document(inputs=[None]),
    "an unknown input": _document(inputs=[_MORE]),
    "a parameter of another type": _document(parameters=[5]),
    "a nested parameter": _document(parameters={"x": {"y": 1}}),
    "a negative priority": _document(parameters={"priority": -1}),
    "an unknown output": _document(outputs=[{"name": "z"}]),
    "outputs of another type": _document(outputs="y"),
    "an unknown type": _input(datatype="FP33"),
    "another type": _input(datatype="INT64"),
    "strings": _input(datatype="BYTES"),
    "an empty name": _input(name=""),
    "a long name": _input(name="x" * 3000),
    "a name that is no text": _input(name="\ud800"),
    "no shape": _input(shape=None),
    "an empty shape": _input(shape=[]),
    "no rows": _input(shape=[0, 4], data=[]),
    "too many rows": _input(shape=[9, 4], data=[1.0] * 36),
    "a negative size": _input(shape=[-1, 4]),
    "sizes of another type": _input(shape=["1", "4"]),
    "300 dimensions": _input(shape=[1] * 300),
    "too few values": _input(data=[1.0]),
    "values of another type": _input(data=[None, "x", {}, True]),
    "nested values": _input(data=[[[1.0], 2.0], 3.0]),
    "a number beyond FP64": _input(data=[10**400] * 4),
    "a negative binary size": _parameters(binary_data_size=-1),
    "a binary size beyond the body": _parameters(binary_data_size=10**18),
    "unknown shared memory": _parameters(
        shared_memory_region="/dev/mem", shared_memory_byte_size=16
    ),
    "bytes that are no JSON": _post(b"\xff\x00{"),
    "half of a document": _post(_document()[-60:-30]),
    "2,000 brackets": _post(b'{"inputs":' + b"[" * 2000),
    "a JSON length beyond the body": _headers(Inference_Header_Content_Length=10**6),
    "a negative JSON length": _headers(Inference_Header_Content_Length=-1),
    "more bytes than announced": _headers(Content_Length=1),
    "fewer bytes than announced": _headers(Content_Length=10**6),
    "an encoding that it has not": _headers(Content_Encoding="gzip"),
    "an unknown model": _headers("/v2/models/../../etc/passwd/infer"),
    "an unknown version": _headers("/v2/models/function/versions/9/infer"),
    "another method": _headers().replace(b"POST", b"BREW", 1),
}


def _wrong_shape(request: Any) -> None:
    request.inputs[0].shape[:] = [2, 5]


def _wrong_type(request: Any) -> None:
    request.inputs[0].datatype = "TYPE_FP32"


def _wrong_name(request: Any) -> None:
    request.inputs[0].name = "y"


def _typed_contents(request: Any) -> None:
    request.inputs[0].contents.int_contents.extend([1])


def _no_contents(request: Any) -> None:
    del request.raw_input_contents[:]


def _more_bytes(request: Any) -> None:
    request.raw_input_contents[0] += b"\0"


def _input_twice(request: Any) -> None:
    request.inputs.add().CopyFrom(request.inputs[0])


def _no_model(request: Any) -> None:
    request.model_name = "../function"


def _wrong_parameter(request: Any) -> None:
    request.parameters["priority"].string_param = "x"


_GRPC: tuple[Callable[[Any], None], ...] = (
    _wrong_shape, _wrong_type, _wrong_name, _typed_contents, _no_contents, _more_bytes,
    _input_twice, _no_model, _wrong_parameter,
)  # fmt: skip


def _messages() -> dict[str, service_pb2.ModelInferRequest]:
    messages = {}
    for change in _GRPC:
        request = service_pb2.ModelInferRequest(model_name="function")
        request.inputs.add(name="x", datatype="FP32", shape=[2, 4])
        request.raw_input_contents.append(_X.tobytes())
        change(request)
        messages[change.__name__] = request
    request = service_pb2.ModelInferRequest(model_name="bytes_in_rows")
    for name in ("blobs", "words"):
        request.inputs.add(name=name, datatype="BYTES", shape=[1, 2])
        request.raw_input_contents.append(b"\xff" * 10)
    return {**messages, _STRINGS: request}


def _over_http(serving: Serving, request: bytes, *, ends: bool) -> tuple[int, str]:
    """Return the status and the text of the answer; 0: the connection was closed instead."""
    host, _, port = serving.server.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as connection:
        connection.sendall(request)
        if ends:  # however many bytes were announced
            connection.shutdown(socket.SHUT_WR)
        response = http.client.HTTPResponse(connection)
        try:
            response.begin()
            return response.status, response.read().decode(errors="replace")
        except (ConnectionError, http.client.HTTPException):
            return 0, ""


def _over_grpc(serving: Serving, request: service_pb2.ModelInferRequest) -> tuple[str, str]:
    with grpc.insecure_channel(serving.server.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            stub.ModelInfer(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return "OK", ""


@pytest.mark.parametrize("requests", [_HTTP, _messages()], ids=["http", "grpc"])
def test_malformed_requests(requests: dict[str, Any], serving: Serving) -> None:
    """Each is refused, the good ones beside it are right, and every process lives on."""
    server = serving.server.process
    started = {process.pid for process in living.descendants(server.pid)}
    for what, request in requests.items():
        with ThreadPoolExecutor(1) as beside:
            good = None if what == _STRINGS else beside.submit(_send_good_requests, serving)
            if isinstance(request, bytes):
                answer: Any = _over_http(serving, request, ends=what.endswith("announced"))
            else:
                answer = _over_grpc(serving, request)
            if good is not None:
                good.result()
        status, text = answer
        assert status not in (200, "OK", "DEADLINE_EXCEEDED"), what
        if status in _FAULTS:
            assert not any(part in text for part in _OURS), (what, answer)
        assert server.poll() is None, what
    _send_good_requests(serving)
    assert started <= {process.pid for process in living.descendants(server.pid)}


def _send_good_requests(serving: Serving) -> None:
    for name, scenario in _MODELS.items():
        serving.check_together(name, [*scenario.calls] * 4)
