"""What a client sends to a model: made up from the model's config, or read from a file."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
from numpy.typing import NDArray

from torch_py_backend.config import dtypes
from torch_py_backend.errors import BenchError, shown

_JSON_SHAPES = (
    '{"inputs": [{"name", "shape", "datatype", "data"}]} as Triton reads it,'
    ' or {"data": [{name: values}]} as perf_analyzer does'
)
EXAMPLE = "example_inputs.safetensors"
_SAFETENSORS = {
    "BOOL": "BOOL", "F16": "FP16", "BF16": "BF16", "F32": "FP32", "F64": "FP64",
    "U8": "UINT8", "U16": "UINT16", "U32": "UINT32", "U64": "UINT64",
    "I8": "INT8", "I16": "INT16", "I32": "INT32", "I64": "INT64",
}  # fmt: skip


class Tensor(NamedTuple):
    """One input of a request.

    Attributes:
        datatype: Triton's name of the type (`FP32`).
        array: the values; BF16 as its bits in uint16, strings as objects.
    """

    datatype: str
    array: NDArray[Any]

    def encoded(self) -> bytes:
        """The bytes that both protocols send."""
        if self.datatype != "BYTES":
            return self.array.tobytes()
        return b"".join(struct.pack("<I", len(one)) + one for one in self.array.flat)


Payload = dict[str, Tensor]
"""The inputs of one request by their names."""


@dataclass(frozen=True, slots=True)
class Input:
    """An input as clients see it; `dims` without the batch dimension."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool


@dataclass(frozen=True, slots=True)
class Model:
    """What a server's config says of what a model takes."""

    name: str
    max_batch_size: int
    inputs: tuple[Input, ...]


def model(name: str, config: Mapping[str, Any]) -> Model:
    """The model of a config that the server told, over either protocol.

    Raises:
        BenchError: a single request to it has not a single answer.
    """
    if config.get("model_transaction_policy", {}).get("decoupled"):
        raise BenchError(
            f"model '{name}' is decoupled; expected one that gives one answer to a request."
        )
    if "sequence_batching" in config:
        raise BenchError(
            f"model '{name}' takes sequences; expected one whose requests stand for themselves."
        )
    inputs = tuple(
        Input(
            entry["name"],
            _datatype(entry["data_type"]),
            tuple(int(dim) for dim in entry.get("dims", ())),
            bool(entry.get("optional")),
        )
        for entry in config.get("input", ())
    )
    return Model(name, int(config.get("max_batch_size", 0)), inputs)


def _datatype(config: str) -> str:
    dtype = dtypes.from_config(config)
    if dtype is None:
        raise BenchError(f"the data type {config} is unknown; use a newer torch-py-backend.")
    return dtype.triton


def made_up(target: Model, rows: int | None, seed: int = 0) -> list[Payload]:
    """One request of valid values: random floats below 1, ones, a short text.

    Dimensions of -1 become 1, optional inputs are sent too.
    """
    random = np.random.default_rng(seed)
    unbatched = rows is None and not target.max_batch_size
    batch = [] if unbatched else [_rows(target, 1 if rows is None else rows)]
    return [
        {
            one.name: _invented(one.datatype, [*batch, *(abs(dim) for dim in one.dims)], random)
            for one in target.inputs
        }
    ]


def _invented(datatype: str, shape: Sequence[int], random: np.random.Generator) -> Tensor:
    if datatype == "BYTES":
        return Tensor(datatype, np.full(shape, b"text", dtype=np.object_))
    if datatype.startswith(("FP", "BF")):
        return _cast(datatype, random.random(shape))
    # An id, a mask and a length of 1 are valid nearly everywhere; 0 is no length.
    return _cast(datatype, np.ones(shape))


def _cast(datatype: str, values: NDArray[Any]) -> Tensor:
    if datatype == "BF16":
        bits = values.astype(np.float32).view(np.uint32) >> 16
        return Tensor(datatype, bits.astype(np.uint16))
    return Tensor(datatype, values.astype(_numpy(datatype)))


def _numpy(datatype: str) -> np.dtype[Any]:
    return np.dtype(dtypes.from_triton(datatype).numpy or "uint16")


def read(path: Path, target: Model, rows: int | None) -> list[Payload]:
    """The requests in a file: safetensors, or JSON as Triton or perf_analyzer reads it.

    With `rows`, the rows of the file in order, so many to a request, from the start again when
    they are used up.

    Raises:
        BenchError: the file cannot be read, or is not for this model.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise BenchError(f"{path} is no file of inputs; expected .safetensors or .json.")
    try:
        content = path.read_bytes()
        found = reader(content, target)
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror or error}.") from error
    except (TypeError, AttributeError, IndexError) as error:
        raise BenchError(f"cannot understand {path}: expected {_JSON_SHAPES}.") from error
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise BenchError(f"cannot understand {path}: {_said(error)}.") from error
    if not found:
        raise BenchError(f"{path} holds no inputs.")
    for payload in found:
        _check(path, payload, target)
    if rows is not None:
        return _regrouped(path, found, _rows(target, rows))
    _check_rows(path, found, target)
    return found


def _said(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing, or is no input of the model"
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


_deserialized: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize


def _from_safetensors(content: bytes, _target: Model) -> list[Payload]:
    payload = {}
    for name, entry in _deserialized(content):
        datatype = _SAFETENSORS.get(entry["dtype"])
        if datatype is None:
            raise ValueError(f"{name} is of type {entry['dtype']}, which Triton does not have")
        array = np.frombuffer(entry["data"], dtype=_numpy(datatype)).reshape(entry["shape"])
        payload[name] = Tensor(datatype, array)
    return [payload] if payload else []


def _from_json(content: bytes, target: Model) -> list[Payload]:
    document = json.loads(content)
    if not isinstance(document, dict) or not {"inputs", "data"} & document.keys():
        raise ValueError(f"expected {_JSON_SHAPES}")
    if "inputs" in document:
        return [
            {
                entry["name"]: _tensor(entry["datatype"], entry["data"], entry["shape"])
                for entry in document["inputs"]
            }
        ]
    steps = [
        step
        for entry in document["data"]
        # perf_analyzer writes several streams as lists of steps.
        for step in (entry if isinstance(entry, list) else [entry])
    ]
    known = {one.name: one for one in target.inputs}
    return [
        {
            name: _step_tensor(known[name], value, batched=target.max_batch_size > 0)
            for name, value in step.items()
        }
        for step in steps
    ]


def _step_tensor(expected: Input, value: Any, *, batched: bool) -> Tensor:
    """perf_analyzer's shapes leave the batch dimension out; each step is one row."""
    entry = value if isinstance(value, dict) else {"content": value}
    shape = list(entry.get("shape", expected.dims))
    if -1 in shape:
        raise ValueError(f"{expected.name} needs a shape: its dims are {list(expected.dims)}")
    shape = [1, *shape] if batched else shape
    if "b64" in entry:
        raw = base64.b64decode(entry["b64"], validate=True)
        if expected.datatype == "BYTES":
            return _tensor("BYTES", [raw.decode()], shape)
        array = np.frombuffer(raw, dtype=_numpy(expected.datatype)).reshape(shape)
        return Tensor(expected.datatype, array)
    return _tensor(expected.datatype, entry["content"], shape)


def _tensor(datatype: str, data: Any, shape: Sequence[int]) -> Tensor:
    """A tensor of JSON's values, flat or nested."""
    if datatype == "BYTES":
        flat = [str.encode(text) for text in np.array(data, dtype=np.object_).reshape(-1).tolist()]
        array = np.empty(len(flat), dtype=np.object_)
        array[:] = flat
        return Tensor(datatype, array.reshape(shape))
    if datatype not in {one.triton for one in dtypes.TABLE}:
        raise ValueError(f"{datatype} is no type of Triton's")
    values = np.array(data)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"numbers are expected where the type is {datatype}")
    return _cast(datatype, values.reshape(shape))


_READERS: dict[str, Callable[[bytes, Model], list[Payload]]] = {
    ".safetensors": _from_safetensors,
    ".json": _from_json,
}


def _rows(target: Model, rows: int) -> int:
    if not target.max_batch_size:
        raise BenchError(
            f"model '{target.name}' has no batch dimension (max_batch_size is 0);"
            " --rows is for models that have one. Leave it out."
        )
    if not 1 <= rows <= target.max_batch_size:
        raise BenchError(
            f"--rows is {rows}; model '{target.name}' takes 1 to {target.max_batch_size} rows"
            " (its max_batch_size) in a request."
        )
    return rows


def _check(path: Path, payload: Payload, target: Model) -> None:
    known = {one.name: one for one in target.inputs}
    unknown = sorted(payload.keys() - known.keys())
    missing = [one.name for one in target.inputs if not one.optional and one.name not in payload]
    if unknown or missing:
        raise BenchError(
            f"{path} holds {shown(sorted(payload)) or 'nothing'}; model '{target.name}' takes"
            f" {shown(known)}."
        )
    for name, tensor in payload.items():
        _check_tensor(path, known[name], tensor, target)


def _check_tensor(path: Path, expected: Input, tensor: Tensor, target: Model) -> None:
    shape = tensor.array.shape
    wanted: tuple[int, ...] = expected.dims
    if target.max_batch_size:
        wanted = (-1, *wanted)
    fits = len(shape) == len(wanted) and all(
        dim in (-1, size) for size, dim in zip(shape, wanted, strict=True)
    )
    if tensor.datatype != expected.datatype or not fits:
        raise BenchError(
            f"{path} holds {expected.name} as {tensor.datatype} {list(shape)}; model"
            f" '{target.name}' takes {expected.datatype} {list(wanted)}."
        )


def _check_rows(path: Path, found: Sequence[Payload], target: Model) -> None:
    if not target.max_batch_size:
        return
    for payload in found:
        counts = {len(tensor.array) for tensor in payload.values()}
        if len(counts) > 1:
            raise BenchError(f"{path} holds inputs that differ in their number of rows.")
        if not 1 <= (rows := counts.pop()) <= target.max_batch_size:
            raise BenchError(
                f"{path} holds {rows} rows; model '{target.name}' takes 1 to"
                f" {target.max_batch_size} (its max_batch_size) in a request. Choose with --rows."
            )


def _regrouped(path: Path, found: Sequence[Payload], rows: int) -> list[Payload]:
    try:
        columns = {
            name: Tensor(
                tensor.datatype, np.concatenate([payload[name].array for payload in found])
            )
            for name, tensor in found[0].items()
        }
    except (ValueError, KeyError) as error:
        raise BenchError(
            f"{path} holds requests of different shapes, which cannot be put together;"
            " leave --rows out."
        ) from error
    counts = {len(column.array) for column in columns.values()}
    if len(counts) > 1 or not (total := counts.pop()):
        raise BenchError(f"{path} holds no rows, or inputs that differ in their number of rows.")
    return [
        {
            name: Tensor(column.datatype, column.array[np.arange(start, start + rows) % total])
            for name, column in columns.items()
        }
        for start in range(0, math.ceil(total / rows) * rows, rows)
    ]
