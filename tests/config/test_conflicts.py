"""Each rule about conflicting settings, and combinations that are accepted."""

from __future__ import annotations

from typing import Any

import build
import pytest

from torch_py_backend.config import model_config
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError

PAD = {"PAD": '{"x": {}}'}
BUCKETS = {"BATCH_BUCKETS": "1"}
SHARED = {"ENABLE_WEIGHT_SHARING": "true"}
COMPILED = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": "{}"}
NOT_COMPILED = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"disable": true}'}
FIXED_SHAPES = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"dynamic": false}'}
GRAPHS = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"mode": "reduce-overhead"}'}

UNBATCHED = {"max_batch_size": 0}
DECOUPLED = {"model_transaction_policy": {"decoupled": True}}
SEQUENCES: dict[str, Any] = {"sequence_batching": {}}
_FP32 = {"data_type": "TYPE_FP32"}
_ZEROS = {**_FP32, "dims": [4], "zero_data": True}
_PAST = {"input_name": "past", "output_name": "y", **_FP32, "dims": [4], "initial_state": [_ZEROS]}
STATEFUL: dict[str, Any] = {"sequence_batching": {"state": [_PAST]}}
VARIABLE_STATE: dict[str, Any] = {
    "sequence_batching": {
        "state": [{"input_name": "h", "output_name": "g", **_FP32, "dims": [2, -1]}]
    }
}
CACHED: dict[str, Any] = {"response_cache": {"enable": True}}
_COUNT = {"target_name": ["n"], "data_type": "TYPE_INT32", "source_input": ["x"]}
BATCH_INPUT: dict[str, Any] = {"batch_input": [_COUNT]}
BATCH_OUTPUT: dict[str, Any] = {"batch_output": [{"target_name": ["y"], "source_input": ["x"]}]}


def parsed(
    kind: str, parameters: dict[str, str], document: dict[str, Any], *, complete: bool = True
) -> ModelConfig:
    entries = {key: {"string_value": value} for key, value in parameters.items()}
    arguments = build.arguments(parameters=entries, **document) | {"model_instance_kind": kind}
    return model_config.parse(arguments, complete=complete)


# Conflicts that decide how the model runs: refused before a config is completed.
_EARLY: list[tuple[str, dict[str, str], dict[str, Any], str]] = [
    ("CPU", {}, DECOUPLED | SEQUENCES, "sequence_batching is set, and the model is decoupled"),
    (
        "CPU",
        {"MODEL_CLASS": "Net", "MODEL_FACTORY": "make"},
        {},
        "MODEL_CLASS is set, and MODEL_FACTORY is set",
    ),
]
_LATE: list[tuple[str, dict[str, str], dict[str, Any], str]] = [
    ("CPU", {}, CACHED | SEQUENCES, "response_cache is enabled, and sequence_batching is set"),
    ("CPU", PAD, VARIABLE_STATE, "PAD is set, and a state of sequence_batching has dims of -1"),
    ("CPU", {"OPTIMIZE": "bf16,fp16"}, {}, "OPTIMIZE asks for bf16, and OPTIMIZE asks for fp16"),
    (
        "CPU",
        {"OPTIMIZE": "fp16", "CAST_INPUTS": "BF16"},
        {},
        "CAST_INPUTS is set, and OPTIMIZE asks for fp16",
    ),
    ("CPU", BUCKETS, UNBATCHED, "BATCH_BUCKETS is set, and max_batch_size is 0"),
    ("CPU", PAD, UNBATCHED, "PAD is set, and max_batch_size is 0"),
    ("CPU", {"PROFILE_DIR": "traces"}, {}, "PROFILE_DIR is 'traces'. Give an absolute path"),
    ("CPU", PAD, DECOUPLED, "PAD is set, and the model is decoupled"),
    ("CPU", BUCKETS, DECOUPLED, "BATCH_BUCKETS is set, and the model is decoupled"),
    ("CPU", COMPILED, DECOUPLED, "OPTIONAL_PARAMETERS is set, and the model is decoupled"),
    ("CPU", {"OPTIMIZE": "freeze"}, DECOUPLED, "OPTIMIZE asks for freeze, and the model is"),
    ("GPU", SHARED, DECOUPLED, "shares the weights on the GPU, and the model is decoupled"),
    ("CPU", PAD, BATCH_OUTPUT, "PAD is set, and config.pbtxt has batch_output"),
    ("CPU", BUCKETS, BATCH_INPUT, "BATCH_BUCKETS is set, and config.pbtxt has batch_input"),
    ("CPU", FIXED_SHAPES, BATCH_INPUT, "has dynamic: false, and config.pbtxt has batch_input"),
    (
        "CPU",
        {},
        BATCH_INPUT | DECOUPLED,
        "the model is decoupled, and config.pbtxt has batch_input",
    ),
    (
        "CPU",
        {},
        BATCH_OUTPUT | STATEFUL,
        "batch_output names a state, and config.pbtxt has batch_output",
    ),
]


@pytest.mark.parametrize(("kind", "parameters", "document", "problem"), _EARLY + _LATE)
def test_conflict(
    kind: str, parameters: dict[str, str], document: dict[str, Any], problem: str
) -> None:
    """Settings that conflict fail the load; the completion only if they decide how it runs."""
    with pytest.raises(ConfigError) as raised:
        parsed(kind, parameters, document)
    assert problem in str(raised.value)
    if (kind, parameters, document, problem) in _EARLY:
        with pytest.raises(ConfigError):
            parsed(kind, parameters, document, complete=False)
    else:
        parsed(kind, parameters, document, complete=False)


@pytest.mark.parametrize(
    ("kind", "parameters", "document"),
    [
        ("GPU", GRAPHS | BUCKETS, {}),
        ("CPU", PAD, STATEFUL),
        ("CPU", {}, CACHED),
        ("CPU", {}, SEQUENCES | {"response_cache": {"enable": False}}),
        ("CPU", {"PROFILE_DIR": "/traces"}, {}),
        ("CPU", NOT_COMPILED | SHARED | {"OPTIMIZE": "bf16"}, DECOUPLED),
        ("CPU", COMPILED, BATCH_INPUT),
    ],
)
def test_accepted_combination(
    kind: str, parameters: dict[str, str], document: dict[str, Any]
) -> None:
    """Settings that do not conflict are accepted together."""
    assert parsed(kind, parameters, document).kind == kind
