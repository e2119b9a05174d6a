"""sequence_batching as frozen objects: scheduling, controls and states."""

from __future__ import annotations

from dataclasses import dataclass

from torch_py_backend.config import dtypes, pbtxt
from torch_py_backend.config.conflicts import refuse
from torch_py_backend.config.dtypes import DType
from torch_py_backend.config.pbtxt import Document

# Triton's default.
_IDLE_MICROSECONDS = 1_000_000
_BOOLEANS = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that a step of a sequence passes to the next step.

    Attributes:
        input: the name of the input of forward().
        output: the name of the output of the previous step.
        dtype: its type.
        dims: its shape, without the batch dimension; -1 means any size.
        initial: its shape in the first step.
        file: the file with its bytes in the first step, in the folder `initial_state` of the model;
            None: it begins with zeros.
    """

    input: str
    output: str
    dtype: DType
    dims: tuple[int, ...]
    initial: tuple[int, ...]
    file: str | None = None


@dataclass(frozen=True, slots=True)
class ControlInput:
    """An input with which Triton's sequence scheduler signals START, END, READY or CORRID.

    Attributes:
        idle: the value of a READY for a slot without a request; None: it is another control.
    """

    name: str
    dtype: DType
    idle: float | None = None


@dataclass(frozen=True, slots=True)
class SequenceConfig:
    """The sequence settings of a model.

    Attributes:
        idle_s: seconds without a request after which Triton ends a sequence.
        controls: inputs that Triton adds to each request.
        states: tensors that are kept between the requests of a sequence.
        direct: whether each sequence has a place in the batch: the strategy `direct`.
        most: the largest number of sequences that Triton runs on an instance at once.
    """

    idle_s: float
    controls: tuple[ControlInput, ...]
    states: tuple[State, ...]
    direct: bool = True
    most: int | None = None


def parse(document: Document) -> SequenceConfig | None:
    """Return the sequence settings of a model; None: its requests are independent of each other.

    Raises:
        ConfigError: `sequence_batching` is invalid, or uses what is not supported.
    """
    batching = document.get("sequence_batching")
    if batching is None:
        return None
    for key in ("iterative_sequence", "generative_sequence"):
        problem = f"sequence_batching contains {key}, which no Python-based backend supports"
        refuse(bool(batching.get(key)), problem, "a config without it")
    oldest = batching.get("oldest") or {}
    return SequenceConfig(
        idle_s=int(batching.get("max_sequence_idle_microseconds") or _IDLE_MICROSECONDS) / 1e6,
        controls=tuple(_parse_control(entry) for entry in batching.get("control_input", ())),
        states=tuple(_parse_state(entry) for entry in batching.get("state", ())),
        direct=batching.get("oldest") is None,
        most=oldest.get("max_candidate_sequences") or max(1, document["max_batch_size"]),
    )


def _parse_control(entry: Document) -> ControlInput:
    control = (entry.get("control") or [{}])[0]
    name = entry["name"]
    for key, dtype in _BOOLEANS.items():
        if control.get(key):
            ready = control.get("kind") == "CONTROL_SEQUENCE_READY"
            idle = float(control[key][0]) if ready else None
            return ControlInput(name, dtypes.from_triton(dtype), idle)
    corrid = dtypes.parse(f"the control input '{name}'", control.get("data_type", pbtxt.NO_TYPE))
    return ControlInput(name, corrid)


def _parse_state(entry: Document) -> State:
    """Return a state with its shape and its file in the first step.

    Triton has checked that the initial state fits the state, and that names differ.
    """
    names = entry["input_name"], entry["output_name"]
    dtype = dtypes.parse(f"the state '{names[0]}'", entry["data_type"])
    dims = _dims(entry)
    for initial in entry.get("initial_state", ()):
        return State(*names, dtype, dims, _dims(initial), initial.get("data_file"))
    # Triton leaves the values undefined then, and uses 1 for sizes of -1.
    return State(*names, dtype, dims, tuple(1 if size == -1 else size for size in dims))


def _dims(entry: Document) -> tuple[int, ...]:
    return tuple(int(size) for size in entry["dims"])  # protobuf's JSON has int64 as strings
