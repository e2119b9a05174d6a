"""Each rule about conflicting settings, and combinations that are accepted."""

from __future__ import annotations

from typing import Any

import build
import pytest

from torch_py_backend.config import model_config
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError

PAD = {"PAD": '{"x": {}}'}
MAP = {"DEVICE_MAP": '{"": "cpu"}'}
STATE = {"STATE": '{"h": "RESULT[1]"}'}
SHARED = {"ENABLE_WEIGHT_SHARING": "true"}
COMPILED = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": "{}"}
NOT_COMPILED = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"disable": true}'}
FIXED_SHAPES = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"dynamic": false}'}
GRAPHS = {"OPTIMIZE": "cuda_graphs"}

UNBATCHED = {"max_batch_size": 0}
DECOUPLED = {"model_transaction_policy": {"decoupled": True}}
STATEFUL: dict[str, Any] = {
    "sequence_batching": {
        "state": [
            {
                "input_name": "past",
                "output_name": "y",
                "data_type": "TYPE_FP32",
                "dims": [4],
                "initial_state": [{"data_type": "TYPE_FP32", "dims": [4], "zero_data": True}],
            }
        ]
    }
}
VARIABLE_STATE: dict[str, Any] = {
    "sequence_batching": {
        "state": [
            {"input_name": "h", "output_name": "g", "data_type": "TYPE_FP32", "dims": [2, -1]}
        ]
    }
}
BATCH_INPUT: dict[str, Any] = {
    "batch_input": [
        {
            "kind": "BATCH_ELEMENT_COUNT",
            "target_name": ["n"],
            "data_type": "TYPE_INT32",
            "source_input": ["x"],
        }
    ]
}
BATCH_OUTPUT: dict[str, Any] = {
    "batch_output": [
        {
            "kind": "BATCH_SCATTER_WITH_INPUT_SHAPE",
            "target_name": ["y"],
            "source_input": ["x"],
        }
    ]
}


def arguments(
    kind: str, parameters: dict[str, str], document: dict[str, Any] | None = None
) -> dict[str, str]:
    entries = {key: {"string_value": value} for key, value in parameters.items()}
    return {
        **build.arguments(parameters=entries, **(document or {})),
        "model_instance_kind": kind,
    }


def parsed(*args: Any, complete: bool = True) -> ModelConfig:
    return model_config.parse(arguments(*args), complete=complete)


@pytest.mark.parametrize(
    ("kind", "parameters", "document", "problem"),
    [
        ("CPU", {}, DECOUPLED | {"sequence_batching": {}}, "sequence_batching is set, and the"),
        ("CPU", STATE, {}, "STATE is set, and config.pbtxt has no sequence_batching"),
        ("CPU", STATE, STATEFUL, "STATE is set, and sequence_batching has state, too"),
        (
            "CPU",
            {"MODEL_CLASS": "Net", "MODEL_FACTORY": "make"},
            {},
            "MODEL_CLASS and MODEL_FACTORY both name what is to be served",
        ),
    ],
)
def test_conflict_during_completion(
    kind: str, parameters: dict[str, str], document: dict[str, Any], problem: str
) -> None:
    """Conflicts that decide how the model runs are refused before a config is completed."""
    for complete in (True, False):
        with pytest.raises(ConfigError) as raised:
            parsed(kind, parameters, document, complete=complete)
        assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "parameters", "document", "problem"),
    [
        ("CPU", {"SEQUENCE_MEMORY_MB": "9"}, {}, "SEQUENCE_MEMORY_MB is set, and no state is"),
        ("CPU", PAD, VARIABLE_STATE, "PAD is set, and a state of sequence_batching has dims of -1"),
        ("CPU", {"OPTIMIZE": "bf16,fp16"}, {}, "OPTIMIZE asks for bf16 and fp16"),
        ("CPU", GRAPHS, {}, "OPTIMIZE asks for cuda_graphs, and the instance is KIND_CPU"),
        ("GPU", GRAPHS, UNBATCHED, "OPTIMIZE asks for cuda_graphs, and max_batch_size is 0"),
        ("CPU", {"BATCH_BUCKETS": "4"}, UNBATCHED, "BATCH_BUCKETS is set, and max_batch_size is 0"),
        ("CPU", {"BATCH_BUCKETS": "4,16"}, {}, "BATCH_BUCKETS holds 16, and max_batch_size is 8"),
        ("CPU", PAD, UNBATCHED, "PAD is set, and max_batch_size is 0"),
        ("GPU", SHARED | {"WATCH_WEIGHTS": "on"}, {}, "WATCH_WEIGHTS is set, and ENABLE_WEIGHT_"),
        ("CPU", {"PROFILE_BATCHES": "3"}, {}, "PROFILE_BATCHES is set, and PROFILE_DIR is not"),
        ("CPU", {"PROFILE_DIR": "traces"}, {}, "PROFILE_DIR is 'traces'. Give an absolute path"),
        ("CPU", PAD, DECOUPLED, "PAD is set, and the model is decoupled"),
        ("CPU", {"BATCH_BUCKETS": "1"}, DECOUPLED, "BATCH_BUCKETS is set, and the model is dec"),
        ("CPU", COMPILED, DECOUPLED, "OPTIONAL_PARAMETERS is set, and the model is decoupled"),
        ("CPU", {"OPTIMIZE": "freeze"}, DECOUPLED, "OPTIMIZE asks for freeze, and the model is"),
        ("GPU", GRAPHS, DECOUPLED, "OPTIMIZE asks for cuda_graphs, and the model is decoupled"),
        ("GPU", SHARED, DECOUPLED, "holds the weights on the GPU once, and the model is decoupled"),
        ("CPU", PAD, BATCH_INPUT, "config.pbtxt has batch_input and PAD"),
        ("CPU", PAD, BATCH_OUTPUT, "config.pbtxt has batch_output and PAD"),
        ("CPU", {"BATCH_BUCKETS": "1"}, BATCH_INPUT, "has batch_input and BATCH_BUCKETS"),
        ("GPU", GRAPHS, BATCH_INPUT, "has batch_input and OPTIMIZE's cuda_graphs"),
        ("CPU", FIXED_SHAPES, BATCH_INPUT, "OPTIONAL_PARAMETERS with dynamic: false"),
        ("CPU", {}, BATCH_INPUT | DECOUPLED, "has batch_input and model_transaction_policy"),
        ("CPU", {}, BATCH_OUTPUT | STATEFUL, "and a state that batch_output names"),
        ("GPU", MAP, {}, "DEVICE_MAP is set, and the instance is KIND_GPU"),
        ("MODEL", MAP, DECOUPLED, "DEVICE_MAP is set, and so is model_transaction_policy { dec"),
        ("MODEL", MAP | COMPILED, {}, "and so is TORCH_COMPILE_OPTIONAL_PARAMETERS"),
        ("MODEL", MAP | {"OPTIMIZE": "bf16,freeze"}, {}, "and so is OPTIMIZE's bf16, freeze"),
        ("MODEL", MAP | SHARED, {}, 'DEVICE_MAP is set, and so is ENABLE_WEIGHT_SHARING "true"'),
    ],
)
def test_conflict(
    kind: str, parameters: dict[str, str], document: dict[str, Any], problem: str
) -> None:
    """Settings that conflict fail the load, but not the completion of a config."""
    with pytest.raises(ConfigError) as raised:
        parsed(kind, parameters, document)

    assert problem in str(raised.value)
    parsed(kind, parameters, document, complete=False)


@pytest.mark.parametrize(
    ("kind", "parameters", "document"),
    [
        ("GPU", GRAPHS | {"BATCH_BUCKETS": "2,8"}, {}),
        ("CPU", PAD, STATEFUL),
        ("CPU", STATE | {"SEQUENCE_MEMORY_MB": "9"}, {"sequence_batching": {}}),
        ("CPU", {"SEQUENCE_MEMORY_MB": "9"}, STATEFUL),
        ("CPU", SHARED | {"WATCH_WEIGHTS": "on"}, {}),
        ("GPU", {"WATCH_WEIGHTS": "on", "ENABLE_WEIGHT_SHARING": "off"}, {}),
        ("CPU", {"PROFILE_DIR": "/traces", "PROFILE_BATCHES": "3"}, {}),
        ("CPU", NOT_COMPILED | SHARED | {"OPTIMIZE": "bf16"}, DECOUPLED),
        ("CPU", COMPILED, BATCH_INPUT),
        ("MODEL", MAP, {}),
        ("MODEL", MAP | NOT_COMPILED | {"OPTIMIZE": "channels_last", "WATCH_WEIGHTS": "on"}, {}),
    ],
)
def test_accepted_combination(
    kind: str, parameters: dict[str, str], document: dict[str, Any]
) -> None:
    """Settings that do not conflict are accepted together."""
    assert parsed(kind, parameters, document).kind == kind
