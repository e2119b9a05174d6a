"""A fake of `triton_python_backend_utils`, as completed by a stub of Triton 24.10.

It refuses what the real module refuses, and raises where the real one corrupts data silently. The
scenarios run against it and against a real server, so that the fake cannot drift.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch

from torch_py_backend.config import pbtxt


class TritonModelException(Exception):  # noqa: N818  Triton's name
    pass


def _passed(text: str) -> str:
    """Return text that can be passed to C++ as UTF-8; raise for any other."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TypeError("incompatible function arguments") from None
    return text


def _decoded(name: str) -> str:
    """Return an ID as pybind11 does, which raises for bytes that are not UTF-8."""
    return name.encode(errors="surrogateescape").decode()


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS = range(7)
    CANCELLED = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        _passed(message)
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Logger:
    lines: ClassVar[list[tuple[str, str]]] = []
    log_info = staticmethod(lambda text: Logger.lines.append(("info", _passed(text))))
    log_warn = staticmethod(lambda text: Logger.lines.append(("warn", _passed(text))))
    log_error = staticmethod(lambda text: Logger.lines.append(("error", _passed(text))))


_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class Metric:
    """One series. Metrics with the same labels share their value."""

    def __init__(self, kind: int, labels: dict[str, str]) -> None:
        assert all(map(_LABEL_NAME.fullmatch, labels)), labels
        assert all(isinstance(value, str) for value in labels.values()), labels
        self.kind, self.labels, self._value = kind, labels, 0.0

    def increment(self, value: float) -> None:
        assert self.kind == MetricFamily.GAUGE or value >= 0
        self._value += value

    def set(self, value: float) -> None:
        assert self.kind == MetricFamily.GAUGE
        self._value = value

    def value(self) -> float:
        return self._value


class MetricFamily:
    COUNTER, GAUGE = range(2)
    made: ClassVar[dict[str, list[Metric]]] = {}
    # Kept by the server, beyond the life of a model: a name keeps its kind.
    kinds: ClassVar[dict[str, int]] = {}

    def __init__(self, name: str, description: str, kind: int) -> None:
        assert _METRIC_NAME.fullmatch(name)
        assert description
        if self.kinds.setdefault(name, kind) != kind:
            raise TritonModelException(
                "Error when creating MetricFamily: Family name already exists with different type"
            )
        self._kind = kind
        self._metrics = self.made.setdefault(name, [])

    def Metric(self, labels: dict[str, str]) -> Metric:  # noqa: N802  Triton's name
        for metric in self._metrics:
            if metric.labels == labels:
                return metric
        self._metrics.append(Metric(self._kind, labels))
        return self._metrics[-1]


class Tensor:
    """A tensor in numpy's memory, or in torch's memory received through DLPack."""

    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        if not isinstance(array, np.ndarray) or array.dtype.kind in "Uc":
            raise TritonModelException(f"Tensor({name!r}) takes no {type(array)}")
        self._name = name
        self._array: np.ndarray[Any, Any] | None = np.ascontiguousarray(array)
        if array.dtype == np.object_:  # strings are sent as bytes
            self._array = np.array(
                [text if isinstance(text, bytes) else str(text).encode() for text in array.flat],
                dtype=np.object_,
            ).reshape(array.shape)
        self._torch: torch.Tensor | None = None

    @classmethod
    def from_dlpack(cls, name: str, capsule: Any) -> Tensor:
        if isinstance(capsule, np.ndarray):
            raise TypeError("the real stub never returns from from_dlpack of a numpy array")
        tensor = torch.utils.dlpack.from_dlpack(capsule)
        if not tensor.is_contiguous():
            raise AssertionError("the real stub would send the wrong bytes")
        stride = 1
        for axis in range(tensor.ndim - 1, 0, -1):  # empty tensors included
            if tensor.stride(axis) != stride:
                raise TritonModelException("DLPack tensor is not contiguous.")
            stride *= tensor.shape[axis]
        return cls.sent(name, tensor)

    @classmethod
    def sent(cls, name: str, tensor: torch.Tensor) -> Tensor:
        """Return a tensor of a request, without a check of its strides."""
        self = cls.__new__(cls)
        self._name, self._array, self._torch = name, None, tensor
        return self

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        if self._torch is None:
            assert self._array is not None
            return self._array
        if self._torch.is_cuda:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        if self._torch.dtype is torch.bfloat16:
            raise TritonModelException("tensor dtype is bf16 and cannot be converted to numpy.")
        return self._torch.numpy()

    def to_dlpack(self) -> Any:
        tensor = torch.from_numpy(self.as_numpy()) if self._torch is None else self._torch
        return torch.utils.dlpack.to_dlpack(tensor)  # type: ignore[attr-defined]


TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU = range(2)


class PreferredMemory(NamedTuple):
    kind: int
    device: int = 0


TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2


class Turn(NamedTuple):
    """A request's place in a sequence; a request with ID 0 only fills a slot."""

    id: int | str
    starts: bool = False
    ends: bool = False


_ALONE = Turn(0)
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class ResponseSender:
    """Records the responses of a decoupled model and their end."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.ended = threading.Event()
        # Called when a response arrives; may, for example, cancel the request.
        self.arrived: Callable[[int], None] = lambda count: None
        self.cancelled = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and flags == 0:
            raise TritonModelException("Inference Response object must be provided")
        if self.ended.is_set():
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if response is not None:
            self.responses.append(response)
            self.arrived(len(self.responses))
        if flags:
            self.ended.set()

    def is_cancelled(self) -> bool:
        if self.ended.is_set():
            raise AssertionError("the real server would read freed memory, and die of it")
        return self.cancelled


class InferenceTrace:
    """A request's trace; it has no context unless Triton traces with OpenTelemetry."""

    def __init__(self, context: str = "") -> None:
        self._context = context

    def get_context(self) -> str | None:
        return self._context or None


class InferenceRequest:
    """A request from the server, or to another model, which is a function in `served`."""

    served: ClassVar[dict[str, Callable[[InferenceRequest], InferenceResponse]]] = {}

    def __init__(
        self,
        inputs: list[Tensor],
        request_id: str = "",
        *,
        cancelled: bool = False,
        turn: Turn = _ALONE,
        parameters: dict[str, Any] | None = None,
        model_name: str = "",
        model_version: int = -1,
        requested_output_names: Sequence[str] = (),
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
    ) -> None:
        self._inputs, self._request_id, self._cancelled = inputs, request_id, cancelled
        self._turn = turn
        self._parameters = parameters or {}
        self.model_name, self.model_version = model_name, model_version
        self.preferred_memory = preferred_memory
        self._trace = trace or InferenceTrace()
        self.sender = ResponseSender()

    def trace(self) -> InferenceTrace:
        return self._trace

    def exec(self) -> InferenceResponse:
        model = self.served.get(self.model_name)
        if model is None:
            message = f"Failed for execute the inference request. Model '{self.model_name}' is not"
            return InferenceResponse(error=TritonError(f"{message} ready.", TritonError.UNKNOWN))
        return model(self)

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def correlation_id(self) -> int | str:
        return self._turn.id if isinstance(self._turn.id, int) else _decoded(self._turn.id)

    def flags(self) -> int:
        starts = TRITONSERVER_REQUEST_FLAG_SEQUENCE_START * self._turn.starts
        return starts | TRITONSERVER_REQUEST_FLAG_SEQUENCE_END * self._turn.ends

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return _decoded(self._request_id)

    def is_cancelled(self) -> bool:
        return self._cancelled


class InferenceResponse:
    def __init__(
        self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None
    ) -> None:
        self._tensors, self._error = output_tensors or [], error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class ModelConfig:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def as_dict(self) -> dict[str, Any]:
        return self._document

    def set_max_batch_size(self, size: int) -> None:
        if self._document["max_batch_size"] > size:
            raise ValueError("configuration specified a larger max_batch_size")
        self._document["max_batch_size"] = size

    def set_dynamic_batching(self) -> None:
        self._document.setdefault("dynamic_batching", {})


_model_dir = ""


def get_model_dir() -> str:
    return _model_dir


def completed(model: Any, arguments: dict[str, str]) -> dict[str, str]:
    """Return Triton's arguments after the model has completed its config."""
    config = ModelConfig(json.loads(arguments["model_config"]))
    model.auto_complete_config(config)
    # Triton's defaults for fields that a model leaves out.
    for role, defaults in (("input", {"optional": False}), ("output", {})):
        config.as_dict()[role] = [{**defaults, **spec} for spec in config.as_dict()[role]]
    return arguments | {"model_config": json.dumps(config.as_dict())}


def request(
    inputs: dict[str, Any],
    document: dict[str, Any],
    request_id: str = "",
    turn: Turn = _ALONE,
    parameters: dict[str, Any] | None = None,
) -> InferenceRequest:
    """Return a request from numpy arrays, reshaped as by Triton; torch tensors are for BF16."""
    specs = {spec["name"]: spec for spec in document["input"]}
    tensors = []
    for name, value in inputs.items():
        if "reshape" in specs[name]:
            batch = value.shape[: len(value.shape) - len(specs[name]["dims"])]
            value = value.reshape(batch + tuple(specs[name]["reshape"]["shape"]))  # noqa: PLW2901
        if isinstance(value, torch.Tensor):
            tensors.append(Tensor.sent(name, value.clone()))
        else:
            tensors.append(Tensor(name, value.copy()))
    sequencing = document.get("sequence_batching")
    if sequencing is not None:
        tensors += [*_controls(sequencing, turn, document), *_states(sequencing, document)]
    return InferenceRequest(tensors, request_id, turn=turn, parameters=parameters)


def _controls(sequencing: dict[str, Any], turn: Turn, document: dict[str, Any]) -> Iterator[Tensor]:
    shape = (1, 1) if document["max_batch_size"] else (1,)
    flags = {
        "CONTROL_SEQUENCE_START": turn.starts,
        "CONTROL_SEQUENCE_END": turn.ends,
        "CONTROL_SEQUENCE_READY": bool(turn.id),
    }
    for entry in sequencing["control_input"]:
        (control,) = entry["control"]
        if control["kind"] == "CONTROL_SEQUENCE_CORRID":
            kind = control["data_type"].removeprefix("TYPE_").lower()
            yield Tensor(entry["name"], np.full(shape, turn.id, dtype=kind))
            continue
        for key, kind in (("int32", "int32"), ("fp32", "float32"), ("bool", "bool")):
            values = control[f"{key}_false_true"]
            if values:
                value = values[flags[control["kind"]]]
                yield Tensor(entry["name"], np.full(shape, value, dtype=kind))


def _states(sequencing: dict[str, Any], document: dict[str, Any]) -> Iterator[Tensor]:
    """Yield Triton's states: uninitialized memory, which no Python-based backend can write."""
    rows = (1,) if document["max_batch_size"] else ()
    for state in sequencing["state"]:
        shape = (*rows, *(max(1, int(size)) for size in state["dims"]))
        if state["data_type"] == "TYPE_STRING":
            yield Tensor(state["input_name"], np.full(shape, b"chance", dtype=np.object_))
        else:
            yield Tensor(state["input_name"], np.full(shape, 77, dtype=np.float32))


def arguments(folder: Path, version: str = "1") -> dict[str, str]:
    """Return the arguments of `initialize` for the model in a folder, which is served then."""
    global _model_dir  # noqa: PLW0603  like the real module: one model per process
    _model_dir = f"{folder}/{version}"
    pytest.importorskip("tritonclient.grpc", reason="not installed (make gpu-site)")
    # Triton names the file of the backend in every case.
    document = pbtxt.read(folder) | {"name": folder.name, "runtime": "model.py"}
    return pbtxt.arguments(folder, version, document)
