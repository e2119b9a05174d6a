"""sequence_batching: accepted and rejected settings."""

from __future__ import annotations

from typing import Any

import build
import pytest

from torch_py_backend.config import dtypes, model_config, sequence_config
from torch_py_backend.config.model_config import ModelConfig, Origin
from torch_py_backend.config.sequence_config import (
    ControlInput,
    SequenceConfig,
    State,
)
from torch_py_backend.errors import ConfigError

_FP32 = dtypes.from_triton("FP32")
_FILE = {"data_type": "TYPE_FP32", "dims": [2, 3], "data_file": "f"}


def block(**changes: Any) -> dict[str, Any]:
    """Return a state block as in Triton's JSON."""
    names = {"input_name": "past", "output_name": "present"}
    return {**names, "data_type": "TYPE_FP32", "dims": [2, -1], **changes}


def with_initial(**changes: Any) -> dict[str, Any]:
    """Return a state block with an initial_state."""
    initial = {"name": "b", "data_type": "TYPE_FP32", "dims": [2, 3], "zero_data": True}
    return block(initial_state=[{**initial, **changes}])


def parsed(batching: dict[str, Any], max_batch_size: int = 8) -> SequenceConfig:
    document = {"max_batch_size": max_batch_size, "sequence_batching": batching}
    config = sequence_config.parse(document)
    assert config is not None
    return config


def model_config_of(batching: dict[str, Any], **document: Any) -> ModelConfig:
    return model_config.parse(build.arguments(sequence_batching=batching, **document))


_OLDEST = {"max_candidate_sequences": 64, "max_queue_delay_microseconds": 2000}


@pytest.mark.parametrize(
    ("batching", "rows", "expected"),
    [
        ({}, 8, (8, 1.0, 0.0)),
        ({"direct": {"max_queue_delay_microseconds": "500"}}, 0, (1, 1.0, 5e-4)),
        ({"oldest": {"max_candidate_sequences": 0}}, 4, (4, 1.0, 0.0)),
        ({"oldest": _OLDEST, "max_sequence_idle_microseconds": "5000000"}, 4, (64, 5.0, 2e-3)),
    ],
)
def test_schedulers(
    batching: dict[str, Any], rows: int, expected: tuple[int, float, float]
) -> None:
    """Slots, idle time and delay are those of Triton's schedulers."""
    direct = "oldest" not in batching
    assert parsed(batching, max_batch_size=rows) == SequenceConfig(*expected, (), (), direct)


@pytest.mark.parametrize(
    ("control", "dtype", "idle"),
    [
        ({"int32_false_true": [0, 1]}, "INT32", None),
        ({"bool_false_true": [False, True]}, "BOOL", None),
        ({"kind": "CONTROL_SEQUENCE_READY", "fp32_false_true": [-1, 1]}, "FP32", -1),
        ({"data_type": "TYPE_UINT64"}, "UINT64", None),
        ({"data_type": "TYPE_STRING"}, "BYTES", None),
    ],
)
def test_controls(control: dict[str, Any], dtype: str, idle: float | None) -> None:
    """The type of a control follows from the values that are set; READY has one for no request."""
    empty = {"int32_false_true": [], "fp32_false_true": [], "data_type": "TYPE_INVALID"}
    config = parsed({"control_input": [{"name": "c", "control": [{**empty, **control}]}]})
    assert config.controls == (ControlInput("c", dtypes.from_triton(dtype), idle),)


@pytest.mark.parametrize(
    ("entry", "initial", "file"),
    [
        (block(), (2, 1), None),  # undefined in Triton, zeros here
        (with_initial(), (2, 3), None),
        (with_initial(dims=["2", "0"]), (2, 0), None),
        (block(initial_state=[_FILE]), (2, 3), "f"),
    ],
    ids=["none", "zeros", "empty", "file"],
)
def test_states(entry: dict[str, Any], initial: tuple[int, ...], file: str | None) -> None:
    """A state has the settings of its block; sizes of -1 are 1 at first, as in Triton."""
    state = State("past", "present", _FP32, (2, -1), initial, file)
    assert parsed({"state": [entry]}).states == (state,)


def test_states_are_inputs_and_outputs() -> None:
    """States are added to inputs and outputs, unless listed there, with the same type."""
    config = model_config_of({"state": [block()]})
    tensors = {(spec.name, spec.origin) for spec in (*config.inputs, *config.outputs)}
    client, state = Origin.CLIENT, Origin.STATE
    assert tensors == {("x", client), ("past", state), ("y", client), ("present", state)}
    listed = {"name": "present", "data_type": "TYPE_FP32", "dims": [2, -1]}
    config = model_config_of({"state": [block()]}, output=[listed])
    assert [(spec.name, spec.origin) for spec in config.outputs] == [("present", client)]


def _state(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"state": list(blocks)}


_CONTROL: dict[str, Any] = {"name": "x", "control": [{"int32_false_true": [0, 1]}]}


@pytest.mark.parametrize(
    ("batching", "message"),
    [
        (_state(block(input_name="")), "called '' as input and 'present' as output"),
        (_state(block(output_name="")), "expected input_name and output_name"),
        (_state(block(data_type="TYPE_INVALID")), "'past' has data_type TYPE_INVALID"),
        (_state(block(input_name="x")), "the input 'x' is defined twice"),
        ({"control_input": [_CONTROL]}, "the input 'x' is defined twice"),
        (_state(block(), block(input_name="other")), "output 'present' is defined twice"),
        (_state(block(initial_state=[{}, {}])), "has 2 entries of initial_state; expected one"),
        (_state(with_initial(data_type="TYPE_FP64")), "data_type TYPE_FP64; expected TYPE_FP32"),
        (_state(with_initial(dims=[2])), "has dims [2]; expected fixed sizes that fit [2, -1]"),
        (_state(with_initial(dims=[2, -1])), "has dims [2, -1]"),
        (
            _state(block(initial_state=[_FILE | {"data_file": "../f"}])),
            "'../f'; expected a file in",
        ),
        (_state(block(initial_state=[_FILE | {"data_file": "/f"}])), "'/f'; expected a file in"),
        (
            _state(block(initial_state=[{"data_type": "TYPE_FP32", "dims": [2, 3]}])),
            "has no values; expected zero_data or data_file",
        ),
        ({"control_input": [{"name": "c", "control": []}]}, "the control input 'c' has no type"),
    ],
)
def test_invalid_settings(batching: dict[str, Any], message: str) -> None:
    """Invalid settings are rejected by name."""
    with pytest.raises(ConfigError) as refusal:
        model_config_of(batching)
    assert message in str(refusal.value)
