"""sequence_batching as frozen objects: scheduling, controls and states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from torch_py_backend.config import dtypes, pbtxt
from torch_py_backend.config.conflicts import refuse
from torch_py_backend.config.dtypes import DType
from torch_py_backend.config.pbtxt import Document
from torch_py_backend.errors import ConfigError

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
    """

    idle_s: float
    controls: tuple[ControlInput, ...]
    states: tuple[State, ...]
    direct: bool = True


def parse(document: Document) -> SequenceConfig | None:
    """Return the sequence settings of a model; None: its requests are independent of each other.

    Raises:
        ConfigError: `sequence_batching` is invalid, or uses what is not supported.
    """
    batching = document.get("sequence_batching")
    if batching is None:
        return None
    for key in ("iterative_sequence", "generative_sequence"):
        problem = (
            f"sequence_batching contains {key}, and no Python-based backend can give a request back"
            " to the scheduler"
        )
        refuse(bool(batching.get(key)), problem, "a config without it")
    sequencing = SequenceConfig(
        idle_s=int(batching.get("max_sequence_idle_microseconds") or _IDLE_MICROSECONDS) / 1e6,
        controls=tuple(_parse_control(entry) for entry in batching.get("control_input", ())),
        states=tuple(_parse_state(entry) for entry in batching.get("state", ())),
        direct=batching.get("oldest") is None,
    )
    _check_names(document, sequencing)
    return sequencing


def _parse_control(entry: Document) -> ControlInput:
    control = (entry.get("control") or [{}])[0]
    key = next((key for key in _BOOLEANS if control.get(key)), None)
    idle = None
    if key is None:
        dtype = dtypes.from_config(control.get("data_type", "unset"))
    else:
        dtype = dtypes.from_triton(_BOOLEANS[key])
        if control.get("kind") == "CONTROL_SEQUENCE_READY":
            idle = float(control[key][0])
    if dtype is None:
        found = f"the control input '{entry.get('name', '')}' has no type"
        expected = f"{', '.join(_BOOLEANS)}, or a data_type for CONTROL_SEQUENCE_CORRID"
        raise ConfigError(found, expected=expected)
    return ControlInput(entry["name"], dtype, idle)


def _parse_state(entry: Document) -> State:
    names = entry.get("input_name", ""), entry.get("output_name", "")
    problem = (
        f"a state of sequence_batching is called '{names[0]}' as input and '{names[1]}' as output"
    )
    refuse(not all(names), problem, "input_name and output_name")
    dtype = dtypes.parse(f"the state '{names[0]}'", entry.get("data_type", "unset"))
    dims = _dims(entry)
    return State(*names, dtype, dims, *_parse_initial(names[0], dims, entry))


def _dims(entry: Document) -> tuple[int, ...]:
    # protobuf's JSON has int64 as strings.
    return tuple(int(size) for size in entry.get("dims", ()))


def _parse_initial(
    name: str, dims: Sequence[int], entry: Document
) -> tuple[tuple[int, ...], str | None]:
    """Return the shape of a state in the first step, and its file."""
    blocks = entry.get("initial_state", ())
    if not blocks:
        # Triton leaves the values undefined then, and uses 1 for sizes of -1.
        return tuple(1 if size == -1 else size for size in dims), None
    block, sizes = blocks[0], _dims(blocks[0])
    subject = f"the initial_state of '{name}' has"
    refuse(len(blocks) > 1, f"the state '{name}' has {len(blocks)} entries of initial_state", "one")
    data_type, expected = block.get("data_type"), entry["data_type"]
    found = f"{subject} data_type {data_type}"
    refuse(data_type != expected, found, f"{expected}, as the state has")
    has_sizes = min(sizes, default=0) >= 0 and pbtxt.fits(sizes, dims)
    expected = f"fixed sizes that fit {list(dims)}, as the state has"
    refuse(not has_sizes, f"{subject} dims {list(sizes)}", expected)
    file = block.get("data_file")
    has_values = file is not None or "zero_data" in block
    refuse(not has_values, f"{subject} no values", "zero_data or data_file")
    path = PurePosixPath(file or "")
    found = f"the data_file of the state '{name}' is '{file}'"
    is_outside = path.is_absolute() or ".." in path.parts
    refuse(is_outside, found, "a file in the folder initial_state of the model")
    return sizes, file or None


def _check_names(document: Document, sequencing: SequenceConfig) -> None:
    """Raise if two inputs, or two state outputs, have the same name.

    The output of a state may also be listed as an output of the model.
    """
    inputs = [entry.get("name", "") for entry in document.get("input", ())]
    inputs += [control.name for control in sequencing.controls]
    inputs += [state.input for state in sequencing.states]
    for role, names in (
        ("input", inputs),
        ("state output", [state.output for state in sequencing.states]),
    ):
        for name in names:
            problem = f"the {role} '{name}' is defined twice among inputs, controls and states"
            refuse(names.count(name) > 1, problem, "unique names")
