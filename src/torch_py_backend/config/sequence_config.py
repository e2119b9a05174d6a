"""sequence_batching and STATE as frozen objects: what Triton tells of sequences, what is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from torch_py_backend.config import dtypes
from torch_py_backend.config.dtypes import DType
from torch_py_backend.errors import ConfigError

# Triton's own default.
_IDLE_MICROSECONDS = 1_000_000
_BOOLEANS = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}


@dataclass(frozen=True, slots=True)
class Initial:
    """What a state is when its sequence begins.

    Attributes:
        dims: its shape, without the batch dimension.
        file: where its bytes lie, in the folder `initial_state` of the model's; None: zeros.
    """

    dims: tuple[int, ...]
    file: str | None = None

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.dims)


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that a step of a sequence takes from the step before.

    Attributes:
        input: the name of what forward() takes.
        output: the name of what it returns.
        dtype: its type; None: whatever the model returns.
        dims: its shape, without the batch dimension; -1 is any size.
        initial: what it is in the first step; None: the first step does without.
    """

    input: str
    output: str
    dtype: DType | None = None
    dims: tuple[int, ...] = ()
    initial: Initial | None = None


@dataclass(frozen=True, slots=True)
class Control:
    """An input by which Triton's scheduler tells a model of START, END, READY or CORRID."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class Sequencing:
    """What config.pbtxt says of a model's sequences.

    Attributes:
        slots: how many sequences Triton gives one instance at a time.
        idle_s: seconds without a request after which Triton forgets a sequence.
        delay_s: seconds that Triton may keep a request back, to fill a batch.
        controls: what Triton adds to each request.
        states: what is kept between the requests of a sequence.
    """

    slots: int
    idle_s: float
    delay_s: float
    controls: tuple[Control, ...]
    states: tuple[State, ...]


def parse(
    model: str, document: Mapping[str, Any], pairs: Mapping[str, str] | None
) -> Sequencing | None:
    """The sequences of a model; None: each request stands for itself.

    Args:
        model: the model's name.
        document: Triton's JSON of config.pbtxt.
        pairs: the option STATE.

    Raises:
        ConfigError: `sequence_batching` contradicts itself, or STATE does.
    """
    batching = document.get("sequence_batching")
    if batching is None:
        if pairs:
            raise ConfigError(
                model,
                "STATE is set, and config.pbtxt has no sequence_batching",
                cure="A state is kept for a sequence: add sequence_batching, or take STATE out.",
            )
        return None
    _refuse_rescheduled(model, batching)
    if document.get("model_transaction_policy", {}).get("decoupled"):
        raise ConfigError(
            model,
            "the model is decoupled, and config.pbtxt has sequence_batching",
            cure="Streams within sequences are not served: take one of them out.",
        )
    blocks = batching.get("state", ())
    if blocks and pairs:
        raise ConfigError(
            model,
            "STATE is set, and sequence_batching has state, too",
            cure="Both say what is kept of a sequence; keep one.",
        )
    oldest, direct = batching.get("oldest"), batching.get("direct") or {}
    slots = int((oldest or {}).get("max_candidate_sequences", 0))
    found = Sequencing(
        slots=slots or max(1, int(document.get("max_batch_size", 0))),
        idle_s=int(batching.get("max_sequence_idle_microseconds") or _IDLE_MICROSECONDS) / 1e6,
        delay_s=int((oldest or direct).get("max_queue_delay_microseconds", 0)) / 1e6,
        controls=tuple(_control(model, entry) for entry in batching.get("control_input", ())),
        states=tuple(_state(model, entry) for entry in blocks)
        or tuple(State(name, path) for name, path in (pairs or {}).items()),
    )
    _refuse_twice(model, document, found)
    return found


def _refuse_rescheduled(model: str, batching: Mapping[str, Any]) -> None:
    for key in ("iterative_sequence", "generative_sequence"):
        if batching.get(key):
            raise ConfigError(
                model,
                f"sequence_batching asks for {key}, and no Python-based backend can give a request"
                " back to the scheduler",
                cure=f"Take {key} out of config.pbtxt.",
            )


def _control(model: str, entry: Mapping[str, Any]) -> Control:
    controls = entry.get("control") or [{}]
    told = controls[0]
    named = next((kind for key, kind in _BOOLEANS.items() if told.get(key)), None)
    dtype = (
        dtypes.from_triton(named) if named else dtypes.from_config(told.get("data_type", "unset"))
    )
    if dtype is None:
        raise ConfigError(
            model,
            f"the control input '{entry.get('name', '')}' has no type",
            expected=f"{', '.join(_BOOLEANS)}, or a data_type for CONTROL_SEQUENCE_CORRID",
        )
    return Control(entry["name"], dtype)


def _state(model: str, entry: Mapping[str, Any]) -> State:
    names = entry.get("input_name", ""), entry.get("output_name", "")
    if not all(names):
        raise ConfigError(
            model,
            f"a state of sequence_batching is called '{names[0]}' as input and '{names[1]}' as"
            " output",
            expected="input_name and output_name",
        )
    dtype = dtypes.from_config(entry.get("data_type", "unset"))
    if dtype is None:
        raise ConfigError(
            model,
            f"the state '{names[0]}' has data_type {entry.get('data_type', 'unset')}",
            expected="one of " + ", ".join(known.config for known in dtypes.TABLE),
        )
    dims = _dims(entry)
    return State(*names, dtype, dims, _initial(model, names[0], dims, entry))


def _dims(entry: Mapping[str, Any]) -> tuple[int, ...]:
    # protobuf's JSON has int64 as strings.
    return tuple(int(size) for size in entry.get("dims", ()))


def _initial(model: str, name: str, dims: Sequence[int], entry: Mapping[str, Any]) -> Initial:
    blocks = entry.get("initial_state", ())
    if not blocks:
        # Triton leaves the values to chance there, and takes 1 for sizes that vary.
        return Initial(tuple(1 if size == -1 else size for size in dims))
    block, found = blocks[0], _dims(blocks[0])
    if len(blocks) > 1:
        raise ConfigError(
            model, f"the state '{name}' has {len(blocks)} entries of initial_state", expected="one"
        )
    if block.get("data_type") != entry["data_type"]:
        raise ConfigError(
            model,
            f"the initial_state of '{name}' has data_type {block.get('data_type')}",
            expected=f"{entry['data_type']}, as the state has",
        )
    fits = len(found) == len(dims) and all(
        size >= 0 and wanted in (-1, size) for size, wanted in zip(found, dims, strict=True)
    )
    if not fits:
        raise ConfigError(
            model,
            f"the initial_state of '{name}' has dims {list(found)}",
            expected=f"fixed sizes that fit {list(dims)}, as the state has",
        )
    return Initial(found, _file(model, name, block))


def _file(model: str, name: str, block: Mapping[str, Any]) -> str | None:
    file: str | None = block.get("data_file")
    if file is None and "zero_data" not in block:
        raise ConfigError(
            model, f"the initial_state of '{name}' has no values", expected="zero_data or data_file"
        )
    path = PurePosixPath(file or "")
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            model,
            f"the data_file of the state '{name}' is '{file}'",
            expected="a file in the folder initial_state of the model's",
        )
    return file or None


def _refuse_twice(model: str, document: Mapping[str, Any], found: Sequencing) -> None:
    """A name stands for one thing; a state's output may be one of the model's as well."""
    inputs = [entry.get("name", "") for entry in document.get("input", ())]
    inputs += [one.name for one in found.controls]
    for kind, names in (
        ("input", [*inputs, *(state.input for state in found.states)]),
        ("state output", [state.output for state in found.states]),
    ):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                model,
                f"the {kind} '{twice[0]}' is there twice among inputs, controls and states",
                expected="a name of its own for each",
            )
