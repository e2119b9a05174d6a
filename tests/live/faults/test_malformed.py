"""Malformed requests beside good ones: no crash, no hang, no error of ours but the client's.

Triton's own parser refuses most of them; the others are those that reach a model. docs/security.md
lists requests at which tritonserver 24.10 itself dies; they are not here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import hostile
import living
import numpy as np
import pytest
import serving
from hostile import SERVED, Answer, Grpc, Http

from torch_py_backend.server import Server

_X = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}
_PATH = hostile.infer_path("affine")
_MODELS = {served.name: served for served in SERVED if served.name in ("affine", "blobs")}
_GOOD = 4  # for each of the models, beside each malformed request
# Triton itself refuses a whole batch in which the lengths of one request's strings are wrong.
_STRINGS = "incomplete string"
_FAULTS = {500, 502, 503, "INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS"}
# What a message of our making has, or one of something that went wrong in our process.
_OURS = ("model '", "Traceback", ".py", "Stub process", "Error:", "/tmp")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("malformed")
    for served in _MODELS.values():
        served.scenario.lay_out(folder / "repository")
    with serving.running(folder) as server:
        yield server


def _input(**values: Any) -> bytes:
    """Return a request whose input has other values than a good one."""
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}
    return _document(inputs=[entry | values])


def _document(**values: Any) -> bytes:
    """Return a request whose JSON has other values than a good one."""
    head, _ = hostile.document(_X, binary=False)
    return hostile.post(_PATH, json.dumps(head | values).encode())


def _headers(path: str = _PATH, **headers: Any) -> bytes:
    head, tail = hostile.document(_X, binary=True)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return hostile.post(path, json.dumps(head).encode(), tail, named)


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
    "bytes that are no JSON": hostile.post(_PATH, b"\xff\x00{"),
    "half of a document": hostile.post(_PATH, _document()[-60:-30]),
    "2,000 brackets": hostile.post(_PATH, b'{"inputs":' + b"[" * 2000),
    "a JSON length beyond the body": _headers(Inference_Header_Content_Length=10**6),
    "a negative JSON length": _headers(Inference_Header_Content_Length=-1),
    "more bytes than announced": _headers(Content_Length=1),
    "fewer bytes than announced": _headers(Content_Length=10**6),
    "an encoding that it has not": _headers(Content_Encoding="gzip"),
    "an unknown model": _headers("/v2/models/../../etc/passwd/infer"),
    "an unknown version": _headers("/v2/models/affine/versions/9/infer"),
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
    request.model_name = "../affine"


def _wrong_parameter(request: Any) -> None:
    request.parameters["priority"].string_param = "x"


_GRPC: tuple[Callable[[Any], None], ...] = (
    _wrong_shape, _wrong_type, _wrong_name, _typed_contents, _no_contents, _more_bytes,
    _input_twice, _no_model, _wrong_parameter,
)  # fmt: skip


async def _answer(server: Server, request: bytes | Any, *, ends: bool) -> Answer:
    """Send a malformed request beside good ones, which must be answered; return its answer."""
    http, grpc = Http(server.http_address), Grpc(server.grpc_address)
    random = np.random.default_rng(0)
    calls = [(name, _MODELS[name].call(random)) for name in _MODELS for _ in range(_GOOD)]
    if isinstance(request, bytes):
        sent = http.send(request, ends=ends)
    else:
        sent = grpc.send(request.SerializeToString())
    good = [grpc.infer(name, call.inputs) for name, call in calls]
    refusal, *answers = await asyncio.gather(sent, *good)
    for (name, call), answer in zip(calls, answers, strict=True):
        again = _STRINGS in answer.text
        last = await grpc.infer(name, call.inputs) if again else answer
        assert hostile.right(call, last), (name, last)
    await asyncio.gather(http.close(), grpc.close())
    return refusal


def _messages() -> dict[str, Any]:
    messages = {}
    for change in _GRPC:
        messages[change.__name__] = hostile.message("affine", _X)
        change(messages[change.__name__])
    strings = hostile.message("blobs", {"blobs": np.array([[b"a", b"b"]], dtype=np.object_)})
    strings.raw_input_contents[0] = b"\xff" * 10
    return messages | {"strings of wrong lengths": strings}


@pytest.mark.parametrize("requests", [_HTTP, _messages()], ids=["http", "grpc"])
def test_malformed_requests(requests: dict[str, Any], server: Server) -> None:
    """Each is refused, the good ones beside it are right, and every process lives on."""
    started = {process.pid for process in living.descendants(server.process.pid)}
    accepted = []
    for what, request in requests.items():
        answer = asyncio.run(_answer(server, request, ends=what.endswith("announced")))
        if answer.good:
            accepted.append(what)
        if answer.status in _FAULTS:
            assert not any(part in answer.text for part in _OURS), (what, answer)
        assert server.process.poll() is None, what
    assert accepted == []
    assert started <= {process.pid for process in living.descendants(server.process.pid)}
