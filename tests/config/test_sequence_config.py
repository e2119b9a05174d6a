"""sequence_batching and STATE: accepted and rejected settings."""

from __future__ import annotations

from typing import Any

import build
import pytest

from torch_py_backend.config import dtypes, model_config, sequence_config
from torch_py_backend.config.model_config import ModelConfig, Origin
from torch_py_backend.config.sequence_config import (
    ControlInput,
    InitialState,
    SequenceConfig,
    State,
)
from torch_py_backend.errors import ConfigError

_FP32 = dtypes.from_triton("FP32")


def block(**changes: Any) -> dict[str, Any]:
    """Return a state block as in Triton's JSON."""
    return {
        "input_name": "past",
        "output_name": "present",
        "data_type": "TYPE_FP32",
        "dims": [2, -1],
        **changes,
    }


def with_initial(**changes: Any) -> dict[str, Any]:
    """Return a state block with an initial_state."""
    initial = {"name": "b", "data_type": "TYPE_FP32", "dims": [2, 3], "zero_data": True}
    return block(initial_state=[{**initial, **changes}])


def parsed(batching: dict[str, Any], max_batch_size: int = 8) -> SequenceConfig:
    document = {"max_batch_size": max_batch_size, "sequence_batching": batching}
    config = sequence_config.parse("digits", document, None)
    assert config is not None
    return config


def model_config_of(batching: dict[str, Any], **document: Any) -> ModelConfig:
    return model_config.parse(build.arguments(sequence_batching=batching, **document))


@pytest.mark.parametrize(
    ("batching", "rows", "slots", "idle", "delay"),
    [
        ({}, 8, 8, 1.0, 0.0),
        ({"direct": {"max_queue_delay_microseconds": "500"}}, 0, 1, 1.0, 5e-4),
        ({"oldest": {"max_candidate_sequences": 0}}, 4, 4, 1.0, 0.0),
        (
            {
                "oldest": {"max_candidate_sequences": 64, "max_queue_delay_microseconds": 2000},
                "max_sequence_idle_microseconds": "5000000",
            },
            4,
            64,
            5.0,
            2e-3,
        ),
    ],
)
def test_schedulers(
    batching: dict[str, Any], rows: int, slots: int, idle: float, delay: float
) -> None:
    """Slots, idle time and delay are those of Triton's schedulers."""
    assert parsed(batching, max_batch_size=rows) == SequenceConfig(slots, idle, delay, (), ())


@pytest.mark.parametrize(
    ("control", "dtype"),
    [
        ({"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}, "INT32"),
        ({"kind": "CONTROL_SEQUENCE_READY", "bool_false_true": [False, True]}, "BOOL"),
        ({"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_UINT64"}, "UINT64"),
        ({"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_STRING"}, "BYTES"),
    ],
)
def test_controls(control: dict[str, Any], dtype: str) -> None:
    """The type of a control follows from the values that are set."""
    empty: dict[str, Any] = {
        "int32_false_true": [],
        "fp32_false_true": [],
        "bool_false_true": [],
        "data_type": "TYPE_INVALID",
    }
    config = parsed({"control_input": [{"name": "c", "control": [{**empty, **control}]}]})

    assert config.controls == (ControlInput("c", dtypes.from_triton(dtype)),)


@pytest.mark.parametrize(
    ("entry", "initial"),
    [
        pytest.param(block(), InitialState((2, 1)), id="by chance in Triton, zeros here"),
        pytest.param(with_initial(), InitialState((2, 3)), id="zeros"),
        pytest.param(with_initial(dims=["2", "0"]), InitialState((2, 0)), id="empty"),
        pytest.param(
            block(
                initial_state=[
                    {"name": "b", "data_type": "TYPE_FP32", "dims": [2, 3], "data_file": "f"}
                ]
            ),
            InitialState((2, 3), "f"),
            id="file",
        ),
    ],
)
def test_states(entry: dict[str, Any], initial: InitialState) -> None:
    """A state has the settings of its block; sizes of -1 are 1 at first, as in Triton."""
    assert parsed({"state": [entry]}).states == (State("past", "present", _FP32, (2, -1), initial),)


def test_states_are_inputs_and_outputs() -> None:
    """States are added to the inputs and outputs of the config."""
    config = model_config_of({"state": [block()]})

    assert [(spec.name, spec.origin) for spec in config.inputs] == [
        ("x", Origin.CLIENT),
        ("past", Origin.STATE),
    ]
    assert [(spec.name, spec.origin) for spec in config.outputs] == [
        ("y", Origin.CLIENT),
        ("present", Origin.STATE),
    ]
    assert config.untyped_states == ()


def test_state_that_is_a_listed_output() -> None:
    """A state that the config lists as an output is not added again, and must have its type."""
    listed = {"name": "present", "data_type": "TYPE_FP32", "dims": [2, -1]}
    config = model_config_of({"state": [block()]}, output=[listed])

    assert [(spec.name, spec.origin) for spec in config.outputs] == [("present", Origin.CLIENT)]
    with pytest.raises(ConfigError, match=r"the output present FP32 \[2\] is a state, too"):
        model_config_of({"state": [block()]}, output=[listed | {"dims": [2]}])


def test_state_by_option() -> None:
    """STATE names states without types."""
    config = model_config_of({}, parameters={"STATE": {"string_value": '{"hidden": "RESULT[1]"}'}})

    assert config.states == config.untyped_states == (State("hidden", "RESULT[1]"),)
    assert [spec.name for spec in config.inputs] == ["x"]


_CONTROL: dict[str, Any] = {
    "name": "x",
    "control": [{"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}],
}


@pytest.mark.parametrize(
    ("batching", "message"),
    [
        ({"iterative_sequence": True}, "iterative_sequence, and no Python-based backend"),
        ({"state": [block(input_name="")]}, "called '' as input and 'present' as output"),
        ({"state": [block(output_name="")]}, "expected input_name and output_name"),
        ({"state": [block(data_type="TYPE_INVALID")]}, "'past' has data_type TYPE_INVALID"),
        ({"state": [block(), block()]}, "the input 'past' is defined twice"),
        ({"state": [block(input_name="x")]}, "the input 'x' is defined twice"),
        ({"control_input": [_CONTROL]}, "the input 'x' is defined twice"),
        (
            {"state": [block(), block(input_name="other")]},
            "the state output 'present' is defined twice",
        ),
        (
            {"state": [block(initial_state=[{}, {}])]},
            "'past' has 2 entries of initial_state; expected one",
        ),
        (
            {"state": [with_initial(data_type="TYPE_FP64")]},
            "has data_type TYPE_FP64; expected TYPE_FP32",
        ),
        (
            {"state": [with_initial(dims=[2])]},
            "has dims [2]; expected fixed sizes that fit [2, -1]",
        ),
        ({"state": [with_initial(dims=[2, -1])]}, "has dims [2, -1]"),
        (
            {
                "state": [
                    block(
                        initial_state=[with_initial()["initial_state"][0] | {"data_file": "../f"}]
                    )
                ]
            },
            "is '../f'; expected a file in the folder initial_state",
        ),
        (
            {"state": [block(initial_state=[{"data_type": "TYPE_FP32", "dims": [2, 3]}])]},
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
