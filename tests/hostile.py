"""Models of every kind of input, good requests for them, and asyncio clients that send anything.

What `tests/live/faults` shares: malformed requests and the soak.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc.aio
import models
import numpy as np
import scenarios
from scenarios import Call, Scenario, config, python, safe, tensor
from tritonclient.grpc import service_pb2
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

Random = np.random.Generator

_TIMEOUT_S = 60.0
_BATCHED = "dynamic_batching { max_queue_delay_microseconds: 500 }\n"


# --- models ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """A model, and how a good request for it is made up, with its answer."""

    scenario: Scenario
    call: Callable[[Random], Call]

    @property
    def name(self) -> str:
        return self.scenario.name


def _floats(random: Random, *shape: int) -> Any:
    return random.standard_normal(shape).astype(np.float32)


def _rows(random: Random) -> int:
    return int(random.integers(1, 5))


_AFFINE = scenarios.affine()


def _affine(random: Random) -> Call:
    x = _floats(random, _rows(random), 4)
    return Call({"x": x}, {"y": scenarios.eager(_AFFINE, x=x)})


def affine(name: str, instances: int = 1) -> Served:
    """A module with weights, of one input of fixed dims."""
    group = f"instance_group [{{ kind: KIND_CPU count: {instances} }}]\n"
    return Served(
        Scenario(
            name,
            scenarios.both(python(models.Affine), safe(_AFFINE.state_dict())),
            config({"x": [4]}, {"y": [3]}, more=_BATCHED + group),
        ),
        _affine,
    )


def _mixed(random: Random) -> Call:
    rows = _rows(random)
    x, factor = _floats(random, rows, 4), float(random.integers(1, 4))
    power, negative = int(random.integers(-3, 3)), bool(random.integers(2))
    unit = "".join(random.choice(list("aé漢"), int(random.integers(0, 4))))
    y = x * np.float32(factor) + power % 7 + len(unit)
    return Call(
        {
            "x": x,
            "power": np.full((rows, 1), power, dtype=np.int64),
            "factor": np.full((rows, 1), factor, dtype=np.float32),
            "negative": np.full((rows, 1), negative),
            "unit": np.full((rows, 1), unit.encode(), dtype=np.object_),
        },
        {"y": -y if negative else y},
    )


def _words(random: Random) -> Call:
    words = random.choice(["a", "bc", "é漢", ""], (_rows(random), 2))
    sent = np.array([[one.encode() for one in row] for row in words], dtype=np.object_)
    joined = [[" ".join(row).encode()] for row in words]
    return Call({"words": sent}, {"y": np.array(joined, dtype=np.object_)})


def _blobs(random: Random) -> Call:
    blobs = np.empty((_rows(random), 2), dtype=np.object_)
    blobs.ravel()[:] = [random.bytes(int(random.integers(0, 9))) for _ in range(blobs.size)]
    return Call({"blobs": blobs}, {"y": blobs[:, ::-1]})


def _padded(random: Random) -> Call:
    rows, length = _rows(random), int(random.integers(1, 9))
    ids = random.integers(0, 99, (rows, length))
    mask = random.integers(0, 2, (rows, length))
    given = bool(random.integers(2))
    used = mask if given else np.ones_like(ids)
    return Call(
        {"ids": ids, **({"mask": mask} if given else {})},
        {"y": ids * 100 + used.cumsum(1) * used, "count": used.sum(1, keepdims=True)},
    )


def _optional(random: Random) -> Call:
    rows = _rows(random)
    sent = {"x": _floats(random, rows, 4)}
    sent |= {name: _floats(random, rows, 4) for name in ("scale", "bias") if random.integers(2)}
    return Call(sent, {"y": sent["x"] * sent.get("scale", 1) + sent.get("bias", 0)})


def _flexible(random: Random) -> Call:
    x = _floats(random, _rows(random), int(random.integers(1, 6)))
    return Call({"x": x}, {"x": x})


def _whole(random: Random) -> Call:
    x = random.integers(-99, 99, (_rows(random), _rows(random)))
    return Call({"x": x}, {"y": 2 * x})


SERVED = (
    affine("affine", instances=2),
    Served(
        Scenario(
            "mixed",
            python(models.Mixed),
            config(
                {"x": [4], "factor": [1]},
                {"y": [4]},
                parameters={"WARMUP": "false"},  # one factor for all rows, which it cannot know
                more=_BATCHED,
            )
            + tensor("input", "power", [1], "INT64")
            + tensor("input", "negative", [1], "BOOL")
            + tensor("input", "unit", [1], "STRING"),
        ),
        _mixed,
    ),
    Served(
        Scenario(
            "words",
            python(models.Rows),
            config({}, {}, more=_BATCHED)
            + tensor("input", "words", [2], "STRING")
            + tensor("output", "y", [1], "STRING"),
        ),
        _words,
    ),
    Served(
        Scenario(
            "blobs",
            python(models.Blobs),
            config({}, {}, more=_BATCHED)
            + tensor("input", "blobs", [2], "STRING")
            + tensor("output", "y", [2], "STRING"),
        ),
        _blobs,
    ),
    Served(
        Scenario(
            "padded",
            python(models.Tokens),
            scenarios.tokens(
                '{"ids": {"multiple_of": 4, "mask": "mask", "outputs": ["y"]}}', _BATCHED
            ),
        ),
        _padded,
    ),
    Served(
        Scenario(
            "optional",
            python(models.Optionals),
            config({"x": [4]}, {"y": [4]}, more=_BATCHED)
            + "".join(
                tensor("input", one, [4], more="optional: true") for one in ("scale", "bias")
            ),
        ),
        _optional,
    ),
    Served(
        Scenario("flexible", python(models.echo), config({"x": [-1]}, {"x": [-1]}, more=_BATCHED)),
        _flexible,
    ),
    Served(
        Scenario(
            "whole",
            python(models.double),
            config({}, {}, max_batch_size=0)
            + tensor("input", "x", [-1, -1], "INT64")
            + tensor("output", "y", [-1, -1], "INT64"),
        ),
        _whole,
    ),
)


# --- what is sent ------------------------------------------------------------------------------


def _raw(value: Any) -> bytes:
    if value.dtype == np.object_:
        packed: bytes = serialize_byte_tensor(value).item() if value.size else b""
        return packed
    return bytes(np.ascontiguousarray(value).tobytes())


def _datatype(value: Any) -> str:
    return str(np_to_triton_dtype(value.dtype))


def document(inputs: Mapping[str, Any], *, binary: bool) -> tuple[dict[str, Any], bytes]:
    """The JSON of an HTTP request, and the binary data behind it."""
    entries, tail = [], b""
    for name, value in inputs.items():
        entry: dict[str, Any] = {"name": name, "datatype": _datatype(value)}
        entry["shape"] = list(value.shape)
        if binary:
            data = _raw(value)
            entry["parameters"] = {"binary_data_size": len(data)}
            tail += data
        else:
            entry["data"] = [
                one.decode() if isinstance(one, bytes) else one for one in value.ravel().tolist()
            ]
        entries.append(entry)
    return {"inputs": entries, "parameters": {"binary_data_output": True}}, tail


def post(
    path: str, head: bytes, tail: bytes = b"", headers: Mapping[str, Any] | None = None
) -> bytes:
    """A request as bytes; `headers` come instead of those that would be right."""
    right = {
        "Host": "localhost",
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": len(head),
        "Content-Length": len(head) + len(tail),
    }
    lines = [f"{key}: {value}" for key, value in {**right, **(headers or {})}.items()]
    text = "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""])
    return text.encode("utf-8", "surrogateescape") + head + tail


def infer_path(model: str) -> str:
    return f"/v2/models/{model}/infer"


def message(model: str, inputs: Mapping[str, Any]) -> service_pb2.ModelInferRequest:
    """A gRPC request."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, value in inputs.items():
        request.inputs.add(name=name, datatype=_datatype(value), shape=list(value.shape))
        request.raw_input_contents.append(_raw(value))
    return request


# --- what comes back ---------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a server said.

    Attributes:
        status: HTTP's status, or the name of gRPC's code; 0: it closed the connection.
        text: the error's message.
        outputs: the arrays, where there are some.
    """

    status: int | str
    text: str
    outputs: Mapping[str, Any]

    @property
    def good(self) -> bool:
        return self.status in (200, "OK")


def right(call: Call, answer: Answer) -> bool:
    """Whether a good request has its own answer."""
    if not answer.good or isinstance(call.expected, scenarios.Refused):
        return False
    return all(
        name in answer.outputs and _same(answer.outputs[name], expected)
        for name, expected in call.expected.items()
    )


def _same(came: Any, expected: Any) -> bool:
    if came.shape != expected.shape:
        return False
    if expected.dtype == np.object_:
        return bool(np.array_equal(came, expected))
    return bool(np.allclose(came, expected, rtol=1e-4, atol=1e-4))


def _array(datatype: str, shape: list[int], raw: bytes) -> Any:
    if datatype == "BYTES":
        return deserialize_bytes_tensor(raw).reshape(shape)
    return np.frombuffer(raw, dtype=triton_to_np_dtype(datatype)).reshape(shape)


class _Reply(NamedTuple):
    """HTTP's answer as it came; status 0: the connection was closed instead."""

    status: int
    fields: Mapping[str, str]
    body: bytes


class Http:
    """One connection, opened again when it is closed."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def infer(self, model: str, inputs: Mapping[str, Any], *, binary: bool = True) -> Answer:
        """A good request."""
        head, tail = document(inputs, binary=binary)
        reply = await self._exchange(post(infer_path(model), json.dumps(head).encode(), tail))
        return _told(reply)._replace(outputs=_outputs(reply) if reply.status == 200 else {})

    async def send(self, request: bytes, *, ends: bool = False) -> Answer:
        """Whatever bytes; `ends`: nothing comes after them, however many were announced."""
        return _told(await self._exchange(request, ends=ends))

    async def _exchange(self, request: bytes, *, ends: bool = False) -> _Reply:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        try:
            writer.write(request)
            if ends:
                writer.write_eof()
            reply = await asyncio.wait_for(_reply(reader), _TIMEOUT_S)
        except (ConnectionError, asyncio.IncompleteReadError):
            reply = _Reply(0, {}, b"")
        except BaseException:
            await self.close()
            raise
        if ends or reply.fields.get("connection") == "close" or not reply.fields:
            await self.close()
        return reply

    async def close(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
            with contextlib.suppress(ConnectionError):  # it was closed by the other side
                await streams[1].wait_closed()


async def _reply(reader: asyncio.StreamReader) -> _Reply:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    length = fields.get("content-length")
    body = await (reader.read() if length is None else reader.readexactly(int(length)))
    return _Reply(int(lines[0].split()[1]), fields if length is not None else {}, body)


def _told(reply: _Reply) -> Answer:
    text = "" if reply.status == 200 else reply.body.decode(errors="replace")
    return Answer(reply.status, text, {})


def _outputs(reply: _Reply) -> dict[str, Any]:
    start = int(reply.fields["inference-header-content-length"])
    outputs = {}
    for entry in json.loads(reply.body[:start])["outputs"]:
        stop = start + entry["parameters"]["binary_data_size"]
        raw = reply.body[start:stop]
        outputs[entry["name"]] = _array(entry["datatype"], entry["shape"], raw)
        start = stop
    return outputs


class Grpc:
    """One channel, that sends messages as the bytes they are given as."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)]
        )

    async def infer(self, model: str, inputs: Mapping[str, Any]) -> Answer:
        """A good request."""
        return await self.answer(self.call(message(model, inputs).SerializeToString()))

    def call(self, request: bytes, method: str = "ModelInfer") -> Any:
        """A call that is on its way; it can be cancelled."""
        sender = self._channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        return sender(request, timeout=_TIMEOUT_S)

    async def send(self, request: bytes, method: str = "ModelInfer") -> Answer:
        """Whatever bytes."""
        return (await _said(self.call(request, method)))[0]

    async def answer(self, call: Any) -> Answer:
        """What came of a good request's call.

        Raises:
            asyncio.CancelledError: it was cancelled.
        """
        said, raw = await _said(call)
        if not said.good:
            return said
        response = service_pb2.ModelInferResponse.FromString(raw)
        pairs = zip(response.outputs, response.raw_output_contents, strict=True)
        outputs = {one.name: _array(one.datatype, list(one.shape), raw) for one, raw in pairs}
        return Answer("OK", "", outputs)

    async def close(self) -> None:
        await self._channel.close()


async def _said(call: Any) -> tuple[Answer, bytes]:
    try:
        raw: bytes = await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise TimeoutError from error
        return Answer(error.code().name, error.details() or "", {}), b""
    return Answer("OK", "", {}), raw
