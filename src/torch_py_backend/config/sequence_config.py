"""sequence_batching: scheduling, controls and states. Triton has checked what it uses itself."""

from __future__ import annotations

from typing import NamedTuple

from torch_py_backend.config import dtypes
from torch_py_backend.config.dtypes import DType
from torch_py_backend.config.pbtxt import Document
from torch_py_backend.errors import ConfigError

# Triton's default.
_IDLE_MICROSECONDS = 1_000_000
_BOOLEANS = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}


class State(NamedTuple):
    """A tensor that a step of a sequence passes to the next step.

    Attributes:
        input: the name of the input of forward().
        output: the name of the output of the previous step.
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


class ControlInput(NamedTuple):
    """An input with which Triton's sequence scheduler signals START, END, READY or CORRID."""

    name: str
    dtype: DType


class SequenceConfig(NamedTuple):
    """The sequence settings of a model.

    Attributes:
        idle_s: seconds without a request after which Triton ends a sequence.
        direct: whether each sequence has a place in the batch: the strategy `direct`.
        most: the largest number of sequences that Triton runs on an instance at once.
    """

    idle_s: float
    controls: tuple[ControlInput, ...]
    states: tuple[State, ...]
    direct: bool
    most: int


def parse(document: Document) -> SequenceConfig | None:
    """Return the sequence settings of a model; None: its requests are independent of each other."""
    batching = document.get("sequence_batching")
    if batching is None:
        return None
    for key in ("iterative_sequence", "generative_sequence"):
        if batching.get(key):
            problem = f"sequence_batching contains {key}, which no Python-based backend supports"
            raise ConfigError(problem, cure="Remove it.")
    oldest = batching.get("oldest")
    return SequenceConfig(
        idle_s=int(batching.get("max_sequence_idle_microseconds") or _IDLE_MICROSECONDS) / 1e6,
        controls=tuple(map(_control, batching.get("control_input", ()))),
        states=tuple(map(_state, batching.get("state", ()))),
        direct=oldest is None,
        most=(oldest or {}).get("max_candidate_sequences") or max(1, document["max_batch_size"]),
    )


def _control(entry: Document) -> ControlInput:
    control = (entry.get("control") or [{}])[0]
    name = entry["name"]
    for key, dtype in _BOOLEANS.items():
        if control.get(key):
            return ControlInput(name, dtypes.from_triton(dtype))
    corrid = dtypes.parse(f"the control input '{name}'", control.get("data_type", "TYPE_INVALID"))
    return ControlInput(name, corrid)


def _state(entry: Document) -> State:
    dtype = dtypes.parse(f"the state '{entry['input_name']}'", entry["data_type"])
    # protobuf's JSON has int64 as strings.
    dims = tuple(map(int, entry["dims"]))
    # Without an initial state, Triton leaves the values undefined, and uses 1 for sizes of -1.
    undefined = {"dims": [abs(size) for size in dims]}
    (initial, *_) = entry.get("initial_state") or [undefined]
    shape = tuple(map(int, initial["dims"]))
    names = entry["input_name"], entry["output_name"]
    return State(*names, dtype, dims, shape, initial.get("data_file"))
