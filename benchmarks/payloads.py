"""Inputs of requests: generated from the model's config, or read from a file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
from numpy.typing import NDArray

from torch_py_backend.config import dtypes, pbtxt
from torch_py_backend.config.model_config import TensorSpec
from torch_py_backend.errors import ToolError, join_names, summarize

_FORM = 'safetensors, or JSON {"inputs": [{"name", "shape", "datatype", "data"}]}'
_SAFETENSORS = {
    "BOOL": "BOOL", "F16": "FP16", "BF16": "BF16", "F32": "FP32", "F64": "FP64",
    "U8": "UINT8", "U16": "UINT16", "U32": "UINT32", "U64": "UINT64",
    "I8": "INT8", "I16": "INT16", "I32": "INT32", "I64": "INT64",
}  # fmt: skip


class Tensor(NamedTuple):
    """One input of a request.

    Attributes:
        datatype: Triton's name of the type (`FP32`).
        array: the values; BF16 as its bits in uint16, strings as an object array of bytes.
    """

    datatype: str
    array: NDArray[Any]

    def encoded(self) -> bytes:
        """Return the bytes that both protocols send."""
        if self.datatype != "BYTES":
            return self.array.tobytes()
        return b"".join(struct.pack("<I", len(text)) + text for text in self.array.flat)


Payload = dict[str, Tensor]
"""The inputs of one request by name."""


@dataclass(frozen=True, slots=True)
class Model:
    """The inputs of a model, from the server's config; with their dims in requests."""

    name: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]

    def check_rows(self, rows: int) -> None:
        """Raise ToolError unless a request may have this number of rows."""
        if not self.max_batch_size:
            raise ToolError(
                f"model '{self.name}' has no batch dimension (max_batch_size is 0); --rows is for"
                " models that have one. Leave it out."
            )
        if not 1 <= rows <= self.max_batch_size:
            raise ToolError(
                f"a request would have {rows} rows; model '{self.name}' takes 1 to"
                f" {self.max_batch_size} (its max_batch_size). Choose with --rows."
            )


def model(name: str, config: Mapping[str, Any]) -> Model:
    """Return the model of a config that a server returned over either protocol.

    Raises:
        ToolError: a request to the model does not have exactly one response.
        ConfigError: the type of an input is unknown.
    """
    if config.get("model_transaction_policy", {}).get("decoupled"):
        raise ToolError(
            f"model '{name}' is decoupled; expected one that gives one answer to a request."
        )
    if "sequence_batching" in config:
        raise ToolError(
            f"model '{name}' takes sequences; expected a model whose requests are independent."
        )
    inputs = []
    for entry in config.get("input", ()):
        dtype = dtypes.parse(f"input '{entry['name']}'", entry["data_type"])
        dims = tuple(int(dim) for dim in entry.get("dims", ()))
        inputs.append(TensorSpec(entry["name"], dtype, dims, bool(entry.get("optional"))))
    return Model(name, int(config.get("max_batch_size", 0)), tuple(inputs))


def generate(target: Model, rows: int | None) -> list[Payload]:
    """Return one request of valid values: random floats below 1, ones, a short text.

    Dimensions of -1 become 1. Optional inputs are included.
    """
    random = np.random.default_rng(0)
    batch = [1] if target.max_batch_size else []
    if rows is not None:
        target.check_rows(rows)
        batch = [rows]
    payload: Payload = {}
    for spec in target.inputs:
        shape = [*batch, *(abs(dim) for dim in spec.dims)]
        datatype = spec.dtype.triton
        if datatype == "BYTES":
            payload[spec.name] = Tensor("BYTES", np.full(shape, b"text", dtype=np.object_))
        elif datatype.startswith(("FP", "BF")):
            payload[spec.name] = _cast(datatype, random.random(shape))
        else:  # 1 is nearly always a valid id, mask or length; 0 is not a length
            payload[spec.name] = _cast(datatype, np.ones(shape))
    return [payload]


def _cast(datatype: str, values: NDArray[Any]) -> Tensor:
    if datatype == "BF16":
        bits = values.astype(np.float32).view(np.uint32) >> 16
        return Tensor(datatype, bits.astype(np.uint16))
    return Tensor(datatype, values.astype(_numpy(datatype)))


def _numpy(datatype: str) -> np.dtype[Any]:
    return np.dtype(dtypes.from_triton(datatype).numpy or "uint16")


def read(path: Path, target: Model, rows: int | None) -> list[Payload]:
    """Return the requests in a file: safetensors, or JSON as Triton reads it.

    With `rows`, each request has that many rows of the file in order; the last request is filled
    from the file's start.

    Raises:
        ToolError: the file cannot be read, or does not fit the model.
    """
    reader = {".safetensors": _from_safetensors, ".json": _from_json}.get(path.suffix)
    if reader is None:
        raise ToolError(f"{path} is not a file of inputs; expected .safetensors or .json.")
    try:
        payload = reader(path.read_bytes())
    except OSError as error:
        raise ToolError(f"cannot read {path}: {error.strerror or error}.") from error
    except (
        LookupError, TypeError, AttributeError, ValueError, safetensors.SafetensorError,
    ) as error:  # fmt: skip
        reason = summarize(error).rstrip(".")
        raise ToolError(f"cannot understand {path}: {reason}; expected {_FORM}.") from error
    if not payload:
        raise ToolError(f"{path} holds no inputs.")
    _check_inputs(path, payload, target)
    if rows is None and not target.max_batch_size:
        return [payload]
    counts = {len(tensor.array) for tensor in payload.values()}
    if len(counts) > 1 or 0 in counts:
        held = " and ".join(map(str, sorted(counts)))
        raise ToolError(f"{path} holds inputs of {held} rows; expected as many of each, above 0.")
    (count,) = counts
    size = count if rows is None else rows
    target.check_rows(size)
    return [
        {
            name: Tensor(tensor.datatype, tensor.array[np.arange(start, start + size) % count])
            for name, tensor in payload.items()
        }
        for start in range(0, count, size)
    ]


_deserialized: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize


def _from_safetensors(content: bytes) -> Payload:
    payload = {}
    for name, entry in _deserialized(content):
        datatype = _SAFETENSORS.get(entry["dtype"])
        if datatype is None:
            raise ValueError(f"{name} is of type {entry['dtype']}, which Triton does not have")
        array = np.frombuffer(entry["data"], dtype=_numpy(datatype)).reshape(entry["shape"])
        payload[name] = Tensor(datatype, array)
    return payload


_encode = np.frompyfunc(str.encode, 1, 1)


def _from_json(content: bytes) -> Payload:
    payload = {}
    for entry in json.loads(content)["inputs"]:
        datatype, values = entry["datatype"], entry["data"]  # flat or nested
        if datatype == "BYTES":
            strings = _encode(np.array(values, dtype=np.object_))
            tensor = Tensor(datatype, strings.reshape(entry["shape"]))
        else:
            numbers = np.array(values)
            if numbers.dtype.kind not in "biuf":
                raise ValueError(f"numbers are expected where the type is {datatype}")
            tensor = _cast(datatype, numbers.reshape(entry["shape"]))
        payload[entry["name"]] = tensor
    return payload


def _check_inputs(path: Path, payload: Payload, target: Model) -> None:
    """Raise unless names, types and shapes are those of the model's inputs."""
    specs = {spec.name: spec for spec in target.inputs}
    required = {spec.name for spec in target.inputs if not spec.optional}
    if not required <= payload.keys() <= specs.keys():
        raise ToolError(
            f"{path} holds {join_names(sorted(payload)) or 'nothing'}; model '{target.name}' takes"
            f" {join_names(specs)}."
        )
    batch = (-1,) if target.max_batch_size else ()
    for name, tensor in payload.items():
        datatype, dims = specs[name].dtype.triton, (*batch, *specs[name].dims)
        shape = tensor.array.shape
        if tensor.datatype != datatype or not pbtxt.fits(shape, dims):
            raise ToolError(
                f"{path} holds {name} as {tensor.datatype} {list(shape)}; model '{target.name}'"
                f" takes {datatype} {list(dims)}."
            )
