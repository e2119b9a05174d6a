"""Malformed requests beside good ones: no crash, no hang, no error of ours but the client's.

Triton's own parser refuses most of them; the others are those that reach a model. docs/security.md
lists requests at which tritonserver 24.10 itself dies; they are not here.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import living
import numpy as np
import pytest
from instances import named
from serving import Serving, asked
from tritonclient.grpc import service_pb2, service_pb2_grpc

_MODELS = ("function", "bytes_in_rows")
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
    for name in _MODELS:
        named(name).lay_out(folder / "repository")
    with asked(folder) as running:
        yield running


def _post(document: Any, tail: bytes = b"", path: str = _PATH, **headers: Any) -> bytes:
    """Return an HTTP request; `headers` come instead of those that would be right."""
    head = document if isinstance(document, bytes) else json.dumps(document).encode()
    right = {
        "Host": "localhost",
        "Inference_Header_Content_Length": len(head),
        "Content_Length": len(head) + len(tail),
    }
    lines = [f"{key.replace('_', '-')}: {value}" for key, value in {**right, **headers}.items()]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + head + tail


_INPUT = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
_GOOD = {"inputs": [{**_INPUT, "data": [1.0, 2.0, 3.0, 4.0]}]}
_BYTES = np.ones((1, 4), np.float32).tobytes()
_BINARY = {"inputs": [{**_INPUT, "parameters": {"binary_data_size": len(_BYTES)}}]}


def _input(**values: Any) -> bytes:
    """Return a request whose input has other values than a good one."""
    return _post({"inputs": [{**_GOOD["inputs"][0], **values}]})


_HTTP: dict[str, bytes] = {
    "an unknown input": _input(name="more"),
    "an unknown output": _post({**_GOOD, "outputs": [{"name": "z"}]}),
    "another type": _input(datatype="INT64"),
    "strings": _input(datatype="BYTES"),
    "a long name": _input(name="x" * 3000),
    "an empty shape": _input(shape=[]),
    "no rows": _input(shape=[0, 4], data=[]),
    "too many rows": _input(shape=[9, 4], data=[1.0] * 36),
    "a negative size": _input(shape=[-1, 4]),
    "too few values": _input(data=[1.0]),
    "unknown shared memory": _input(
        parameters={"shared_memory_region": "/dev/mem", "shared_memory_byte_size": 16}
    ),
    "a JSON length beyond the body": _post(_BINARY, _BYTES, Inference_Header_Content_Length=10**6),
    "more bytes than announced": _post(_BINARY, _BYTES, Content_Length=1),
    "fewer bytes than announced": _post(_BINARY, _BYTES, Content_Length=10**6),
    "an unknown model": _post(_GOOD, path="/v2/models/../../etc/passwd/infer"),
}


def _message(**fields: Any) -> service_pb2.ModelInferRequest:
    """Return a gRPC request whose fields differ from a good one's."""
    good = {"model_name": "function", "inputs": [_INPUT], "raw_input_contents": [_BYTES]}
    return service_pb2.ModelInferRequest(**{**good, **fields})


_GRPC = {
    "another shape": _message(inputs=[{**_INPUT, "shape": [1, 5]}]),
    "an unknown type": _message(inputs=[{**_INPUT, "datatype": "TYPE_FP32"}]),
    "an unknown input": _message(inputs=[{**_INPUT, "name": "y"}]),
    "contents twice": _message(inputs=[{**_INPUT, "contents": {"int_contents": [1]}}]),
    "no contents": _message(raw_input_contents=[]),
    "more bytes than the shape": _message(raw_input_contents=[_BYTES + b"\0"]),
    "an input twice": _message(inputs=[_INPUT, _INPUT]),
    "an unknown model": _message(model_name="../function"),
    "a parameter of another type": _message(
        parameters={"priority": service_pb2.InferParameter(string_param="x")}
    ),
    _STRINGS: _message(
        model_name="bytes_in_rows",
        inputs=[
            {"name": name, "datatype": "BYTES", "shape": [1, 2]} for name in ("blobs", "words")
        ],
        raw_input_contents=[b"\xff" * 10] * 2,
    ),
}


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


@pytest.mark.parametrize("requests", [_HTTP, _GRPC], ids=["http", "grpc"])
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
    for name in _MODELS:
        serving.check_together(name, [*named(name).calls] * 4)
