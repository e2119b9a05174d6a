"""Settings of config.pbtxt that fail the load, and combinations that are accepted."""

from __future__ import annotations

from typing import Any

import build
import pytest

from torch_py_backend.config import model_config
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError

_OPTIONS: dict[str, dict[str, str]] = {
    "pad": {"PAD": '{"x": {}}'},
    "buckets": {"BATCH_BUCKETS": "1"},
    "compiled": {"TORCH_COMPILE_OPTIONAL_PARAMETERS": "{}"},
    "not compiled": {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"disable": true}'},
    "fixed shapes": {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"dynamic": false}'},
    "graphs": {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"mode": "reduce-overhead"}'},
    "shared": {"ENABLE_WEIGHT_SHARING": "true"},
    "freeze": {"OPTIMIZE": "freeze"},
    "profile": {"PROFILE_DIR": "traces"},
    "both types": {"OPTIMIZE": "bf16,fp16"},
    "class and factory": {"MODEL_CLASS": "Net", "MODEL_FACTORY": "make"},
}
_X: dict[str, Any] = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}
_STATE = {"input_name": "h", "output_name": "g", "data_type": "TYPE_FP32", "dims": [2, -1]}
_COUNT = {"kind": "BATCH_ELEMENT_COUNT", "data_type": "TYPE_INT32"}


def _sequences(**batching: Any) -> dict[str, Any]:
    return {"sequence_batching": batching}


def _state(**changes: Any) -> dict[str, Any]:
    return _sequences(state=[_STATE | changes])


_DOCUMENTS: dict[str, dict[str, Any]] = {
    "": {},
    "unbatched": {"max_batch_size": 0},
    "stream": {"model_transaction_policy": {"decoupled": True}},
    "sequences": _sequences(),
    "state": _state(),
    "state y": _state(output_name="y", dims=[4]),
    "batch_input": {"batch_input": [_COUNT | {"target_name": ["n"], "source_input": ["x"]}]},
    "batch_output": {"batch_output": [{"target_name": ["y"], "source_input": ["x"]}]},
}


def _named(settings: str, kind: str = "CPU", *, complete: bool = True) -> ModelConfig:
    """Parse a config with some options and settings of the tables above, by their names."""
    parameters: dict[str, str] = {}
    document: dict[str, Any] = {}
    for name in settings.split(" + "):
        parameters |= _OPTIONS.get(name, {})
        document |= {} if name in _OPTIONS else _DOCUMENTS[name]
    entries = {key: {"string_value": value} for key, value in parameters.items()}
    arguments = build.arguments(parameters=entries, **document) | {"model_instance_kind": kind}
    return model_config.parse(arguments, complete=complete)


_CONFLICTS = {
    "stream + sequences": "sequence_batching is set, and the model is decoupled",
    "class and factory": "MODEL_CLASS is set, and MODEL_FACTORY is set",
    "both types": "OPTIMIZE asks for bf16, and OPTIMIZE asks for fp16",
    "pad + state": "PAD is set, and a state of sequence_batching has dims of -1",
    "buckets + unbatched": "BATCH_BUCKETS is set, and max_batch_size is 0",
    "pad + unbatched": "PAD is set, and max_batch_size is 0",
    "pad + stream": "PAD is set, and the model is decoupled",
    "buckets + stream": "BATCH_BUCKETS is set, and the model is decoupled",
    "compiled + stream": "OPTIONAL_PARAMETERS is set, and the model is decoupled",
    "freeze + stream": "OPTIMIZE asks for freeze, and the model is",
    "profile + stream": "PROFILE_DIR is set, and the model is decoupled",
    "shared + stream": "shares the weights on the GPU, and the model is decoupled",
    "pad + batch_output": "PAD is set, and config.pbtxt has batch_input or",
    "buckets + batch_input": "BATCH_BUCKETS is set, and config.pbtxt has batch_input or",
    "fixed shapes + batch_input": "has dynamic: false, and config.pbtxt has batch_input or",
    "stream + batch_input": "the model is decoupled, and config.pbtxt has batch_input or",
}


@pytest.mark.parametrize(("settings", "message"), _CONFLICTS.items())
def test_conflict_fails_the_load_but_not_the_completion(settings: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        _named(settings, "GPU")
    assert message in str(raised.value)
    _named(settings, complete=False)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("GPU", "graphs + buckets"),
        ("CPU", "pad + state y"),
        ("CPU", "not compiled + shared + stream"),
        ("CPU", "compiled + batch_input"),
    ],
)
def test_accepted_combination(kind: str, settings: str) -> None:
    assert _named(settings, kind).kind == kind


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"cc_model_filenames": {"8.0": "a.pt"}}, "cc_model_filenames is set. Use default"),
        ({"output": []}, "config.pbtxt lists no inputs, or no outputs"),
        ({"input": [_X | {"data_type": "TYPE_BYTES"}]}, "'x' has data_type TYPE_BYTES; expected"),
        (_state(data_type="TYPE_INVALID"), "'h' has data_type TYPE_INVALID"),
    ],
)
def test_invalid_setting(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        model_config.parse(build.arguments(**document))
    assert message in str(raised.value)
