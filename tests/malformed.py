"""Malformed requests, made up from a seed: damaged in one way each, or in several."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import hostile
from hostile import Random, Served
from tritonclient.grpc import service_pb2


@dataclass(frozen=True)
class Malformed:
    """A request, and what was done to it.

    Attributes:
        what: the damage.
        request: HTTP's bytes with their head, or gRPC's message.
        ends: nothing comes after it, however much it announces.
        method: gRPC's method.
    """

    what: str
    request: bytes
    ends: bool = False
    method: str = "ModelInfer"


# Changes a document of HTTP or a message of gRPC.
_Change = Callable[[Any, Random], object]


def _number(random: Random, *bounds: int) -> int:
    return int(random.integers(*bounds))


def _pick(random: Random, values: Any) -> Any:
    return values[_number(random, len(values))]


def _damage(data: bytearray, how: str, random: Random, flips: int) -> None:
    """Cut bytes off, change some of them, or replace them all."""
    if how == "cut":
        del data[_number(random, len(data)) :]
    elif how == "flip":
        for _ in range(_number(random, 1, flips)):
            data[_number(random, len(data))] = _number(random, 256)
    elif how == "noise":
        data[:] = random.bytes(_number(random, 0, 300))


# --- HTTP --------------------------------------------------------------------------------------

_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**31, 2**63, -(2**63), 10**30, 1e308, "", "x", "\0", "漢" * 50,
    [], {}, [[]], [None], {"x": 1}, [1, [2]], "a" * 5000,
)  # fmt: skip
# Not those whose bytes overflow to 0 ([2**32, 2**32]): where dims are -1, Triton's stub of 24.10
# ends at them, before it calls any code of ours. docs/security.md says so.
_SHAPES: tuple[Any, ...] = (
    [], [0], [0, 4], [0, 2], [0, 3], [1], [4], [-1, 4], [1, -1], [2**32 + 1, 4], [10**9, 10**9],
    [1, 4, 1], [9, 4], [10**6, 10**6], [1, 0], [2, 0], ["1", "4"], [1.5, 4], None, "[1,4]",
    {"0": 1}, [1] * 300, [[1, 4]],
)  # fmt: skip
_TYPES = (
    "FP32", "FP64", "FP16", "BF16", "INT64", "INT8", "UINT64", "BOOL", "BYTES", "fp32", "TYPE_FP32",
    "", "FP33", None, 7, "STRING",
)  # fmt: skip
_NAMES = ("", "y", "X", "x\0", "../x", "x" * 3000, "INPUT__0", "\ud800", "漢")
_SIZES = (-1, 0, 1, 3, 7, 2**31, 2**63, 10**18, "16", None, 1.5)
_PARAMETERS: tuple[Any, ...] = (
    [], "x", 5, {"sequence_id": 7, "sequence_start": True, "sequence_end": True}, {"priority": -1},
    {"priority": 2**70}, {"timeout": -5}, {"timeout": "soon"}, {"sequence_id": 2**64},
    {"sequence_start": "yes"}, {"x": [1]}, {"x": {"y": 1}}, {"triton_x": 1},
)  # fmt: skip
_ONE_MORE = {"name": "more", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}


def _document(served: Served, random: Random) -> tuple[dict[str, Any], bytes]:
    call = served.call(random)
    # Bytes that are no text cannot be said in JSON.
    binary = served.name == "blobs" or bool(random.integers(2))
    return hostile.document(call.inputs, binary=binary)


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Every place in a document, as its container and its key."""
    entries = list(node.items() if isinstance(node, dict) else enumerate(node))
    found = [(node, key) for key, _ in entries]
    for _, value in entries:
        if isinstance(value, dict | list):
            found += _places(value)
    return found


def _odd_value(head: Any, random: Random) -> None:
    container, key = _pick(random, _places(head))
    container[key] = copy.deepcopy(_pick(random, _ODD))


def _missing_value(head: Any, random: Random) -> None:
    container, key = _pick(random, _places(head))
    del container[key]


def _odd(key: str, values: Any) -> _Change:
    """Return a change of one value of one input."""

    def change(head: Any, random: Random) -> None:
        _pick(random, head["inputs"])[key] = _pick(random, values)

    return change


def _twice(head: Any, random: Random) -> None:
    entry = _pick(random, head["inputs"])
    head["inputs"] += [copy.deepcopy(entry)] * _number(random, 1, 40)


def _odd_size(head: Any, random: Random) -> None:
    size = {"binary_data_size": _pick(random, _SIZES)}
    _pick(random, head["inputs"])["parameters"] = size


def _odd_data(head: Any, random: Random) -> None:
    entry = _pick(random, head["inputs"])
    entry.pop("parameters", None)
    data = entry.get("data") or [1.0]
    wrong = [data[:-1], [*data, *data], [data], [[data], data], data[0], None, "text"]
    odd: tuple[Any, ...] = (None, "x", 1e400, {}, True, 10**30)
    entry["data"] = _pick(random, wrong + [[one] * len(data) for one in odd])


def _odd_outputs(head: Any, random: Random) -> None:
    region = {"shared_memory_region": "none", "shared_memory_byte_size": 8}
    ways: list[dict[str, Any]] = [region, {"binary_data": "x"}]
    if all(entry.get("datatype") != "BYTES" for entry in head["inputs"]):
        # A tritonserver of 24.10 divides by the size of a string's element, and dies.
        ways += [{"classification": -3}, {"classification": 10**9}]
    odd = [{"name": "y", "parameters": _pick(random, ways)}]
    head["outputs"] = _pick(random, [[{"name": "z"}], [{}], "y", [None], [{"name": "y"}] * 50, odd])


def _shared_memory(head: Any, random: Random) -> None:
    region = {"shared_memory_region": _pick(random, ["none", "", "/dev/mem", "../x"])}
    sizes = {"shared_memory_byte_size": _pick(random, [16, 0, -1, 2**63])}
    _pick(random, head["inputs"])["parameters"] = region | sizes


_DOCUMENT: Mapping[str, _Change] = {
    "odd value": _odd_value,
    "another odd value": _odd_value,
    "missing value": _missing_value,
    "odd shape": _odd("shape", _SHAPES),
    "odd type": _odd("datatype", _TYPES),
    "odd name": _odd("name", _NAMES),
    "twice": _twice,
    "one less": lambda head, random: head["inputs"].pop(_number(random, len(head["inputs"]))),
    "one more": lambda head, _: head["inputs"].append(copy.deepcopy(_ONE_MORE)),
    "odd size": _odd_size,
    "odd data": _odd_data,
    "odd outputs": _odd_outputs,
    "odd parameters": lambda head, random: head.update(
        parameters=copy.deepcopy(_pick(random, _PARAMETERS))
    ),
    "shared memory": _shared_memory,
}
_MOST_VALUES = 10**6


def _claims_memory(head: Any) -> bool:
    """Whether a shape claims more than a server should make room for.

    A tritonserver of 24.10 makes room for what a shape says where the values are JSON, before it
    counts them: it dies at once, or is busy for minutes. docs/security.md says so.
    """
    inputs = head.get("inputs") if isinstance(head, dict) else None
    entries = inputs if isinstance(inputs, list) else ()
    shapes = [one.get("shape") for one in entries if isinstance(one, dict)]
    return any(
        math.prod(abs(size) for size in shape if isinstance(size, int)) > _MOST_VALUES
        for shape in shapes
        if isinstance(shape, list)
    )


def _of_document(served: Served, random: Random) -> Malformed:
    """A document that says what it should not."""
    head, tail = _document(served, random)
    done = []
    for _ in range(_number(random, 1, 3)):
        name, change = _pick(random, [*_DOCUMENT.items()])
        try:
            change(head, random)
        except (LookupError, TypeError, AttributeError, ValueError):
            continue  # the first change has taken away what the second looks for
        done.append(name)
    if _claims_memory(head):
        return _of_document(served, random)
    text = json.dumps(head).encode()
    return Malformed(", ".join(done), hostile.post(hostile.infer_path(served.name), text, tail))


def _of_bytes(served: Served, random: Random) -> Malformed:
    """A body whose bytes are damaged; its lengths are right."""
    document, tail = _document(served, random)
    head = bytearray(json.dumps(document).encode())
    how = _pick(random, ["cut", "flip", "noise", "utf8", "deep", "tail", "strings"])
    _damage(head, how, random, 9)
    if how == "utf8":
        at = _number(random, len(head))
        head[at:at] = _pick(random, [b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\x00"])
    elif how == "deep":
        head[:] = b'{"inputs":' + _pick(random, [b"[", b'{"a":']) * _number(random, 10, 2000)
    elif how == "tail":
        tail = tail[: _number(random, len(tail) + 1)]
    elif how == "strings" and tail:  # lengths of strings, and what is no UTF-8
        tail = random.bytes(len(tail))
    return Malformed(how, hostile.post(hostile.infer_path(served.name), bytes(head), tail))


def _of_headers(served: Served, random: Random) -> Malformed:
    """Headers, methods and paths that are not what follows them."""
    document, tail = _document(served, random)
    head = json.dumps(document).encode()
    path = hostile.infer_path(served.name)
    numbers = [-1, 0, 1, len(head) - 1, len(head) + 1, 10**6, 2**31, 2**63, 2**64, "", "x", "1e3"]
    how = _pick(random, ["json", "length", "path", "first line", "encoding", "header"])
    headers: dict[str, Any] = {}
    first = b"POST"
    if how == "json":
        # Larger numbers end servers 26.06 to 26.08 (docs/security.md); 24.10 answers 400.
        lengths = [number for number in numbers if number not in (2**31, 2**63, 2**64)]
        headers = {"Inference-Header-Content-Length": _pick(random, lengths)}
    elif how == "length":
        headers = {"Content-Length": _pick(random, numbers)}
    elif how == "path":
        paths = ["/v2/models//infer", "/v2/models/none/infer", "/v2/models/%00/infer"]
        paths.append("/v2/" + "a" * 3000)
        versions = ("9", "x", "-1", "2e5")
        paths += [f"/v2/models/{served.name}/versions/{one}/infer" for one in versions]
        paths += ["/v2/models/../../etc/passwd/infer", f"{path}?a=%zz", f"/{path}", f"{path}/more"]
        path = _pick(random, paths)
    elif how == "first line":
        wrong = [b"GET", b"PUT", b"DELETE", b"BREW", b"post", b"POST" * 100, b"\x00", b""]
        first = _pick(random, wrong)
    elif how == "encoding":
        headers = {"Content-Encoding": _pick(random, ["gzip", "deflate", "br", "x"])}
    else:
        extra = {"X": "a" * _number(random, 1, 9000), "Connection": "x", "Expect": "200-ok"}
        headers = {"Host": "", "Accept-Encoding": "\udcff", **extra}
    request = hostile.post(path, head, tail, headers)
    return Malformed(how, first + request.removeprefix(b"POST"), ends=True)


def http(served: Served, random: Random) -> Malformed:
    """One malformed request over HTTP."""
    kinds = (_of_document, _of_document, _of_document, _of_bytes, _of_headers)
    malformed: Malformed = _pick(random, kinds)(served, random)
    return malformed


# --- gRPC --------------------------------------------------------------------------------------


def _wrong_shape(request: Any, random: Random) -> None:
    shapes = [one for one in _SHAPES if isinstance(one, list)]
    shape = [size for size in _pick(random, shapes) if isinstance(size, int) and abs(size) < 2**63]
    entry = _pick(random, request.inputs)
    del entry.shape[:]
    entry.shape.extend(shape)


def _wrong(field: str, values: Any) -> _Change:
    """Return a change of one field of one input."""

    def change(request: Any, random: Random) -> None:
        value = _pick(random, values)
        setattr(_pick(random, request.inputs), field, value)

    return change


def _doubled(request: Any, random: Random) -> None:
    entry = _pick(random, request.inputs)
    for _ in range(_number(random, 1, 40)):
        request.inputs.add().CopyFrom(entry)
        if random.integers(2):
            request.raw_input_contents.append(b"\0" * 16)


def _dropped(request: Any, random: Random) -> None:
    part = _pick(random, [request.inputs, request.raw_input_contents])
    del part[_number(random, len(part))]


def _wrong_bytes(request: Any, random: Random) -> None:
    at = _number(random, len(request.raw_input_contents))
    size = len(request.raw_input_contents[at])
    sizes = [0, 1, size, max(0, size - 1), size + 1, 4 * size, 100_000]
    request.raw_input_contents[at] = random.bytes(_pick(random, sizes))


def _typed(request: Any, random: Random) -> None:
    """Typed contents, of the wrong type or number, beside raw ones or in their place."""
    contents = _pick(random, request.inputs).contents
    contents.fp32_contents.extend([1.0] * _number(random, 0, 9))
    contents.int_contents.extend([1] * _number(random, 0, 3))
    contents.bytes_contents.extend([b"\xff"] * _number(random, 0, 3))
    if random.integers(2):
        del request.raw_input_contents[:]


def _wrong_model(request: Any, random: Random) -> None:
    request.model_name = _pick(random, ["", "none", "../affine", "a" * 3000, "\0"])
    request.model_version = _pick(random, ["", "9", "-1", "x", "1" * 50])


def _wrong_parameters(request: Any, random: Random) -> None:
    name = _pick(random, ["priority", "timeout", "sequence_id", "sequence_start", "triton_x", ""])
    if random.integers(2):
        request.parameters[name].int64_param = _pick(random, [-1, 0, 2**63 - 1])
    else:
        request.parameters[name].string_param = _pick(random, ["", "x", "漢"])
    region = _pick(random, request.inputs).parameters
    if random.integers(2):
        region["shared_memory_region"].string_param = "none"
        region["shared_memory_byte_size"].int64_param = _pick(random, [-1, 0, 16, 2**62])


def _wrong_outputs(request: Any, random: Random) -> None:
    output = request.outputs.add(name=_pick(random, ["z", "", "y", "y\0"]))
    strings = any(entry.datatype == "BYTES" for entry in request.inputs)
    if not strings:  # a tritonserver of 24.10 divides by the size of a string, and dies
        output.parameters["classification"].int64_param = _pick(random, [-1, 0, 2**62])


_MESSAGE: Mapping[str, _Change] = {
    "shape": _wrong_shape,
    "type": _wrong("datatype", [one for one in _TYPES if isinstance(one, str)]),
    "name": _wrong("name", ["", "y", "x" * 3000, "漢", "\0", "INPUT__0"]),
    "doubled": _doubled,
    "dropped": _dropped,
    "bytes": _wrong_bytes,
    "other bytes": _wrong_bytes,
    "typed": _typed,
    "model": _wrong_model,
    "parameters": _wrong_parameters,
    "outputs": _wrong_outputs,
}


def grpc(served: Served, random: Random) -> Malformed:
    """One malformed request over gRPC."""
    message = hostile.message(served.name, served.call(random).inputs)
    if random.integers(5) == 0:
        data = bytearray(message.SerializeToString())
        how = _pick(random, ["cut", "flip", "noise", "method"])
        _damage(data, how, random, 6)
        methods = ["ModelConfig", "ModelMetadata", "None", "ModelStatistics", "ModelReady"]
        method = _pick(random, methods) if how == "method" else "ModelInfer"
        return Malformed(how, bytes(data), method=method)
    done = []
    for _ in range(_number(random, 1, 3)):
        name, change = _pick(random, [*_MESSAGE.items()])
        if message.inputs and message.raw_input_contents:
            change(message, random)
            done.append(name)
    assert isinstance(message, service_pb2.ModelInferRequest)
    return Malformed(", ".join(done), message.SerializeToString())
