"""Triton's arguments as a ModelConfig: settings, and those that fail the load."""

import dataclasses
import operator
import re
from typing import Any

import build
import pytest

from torch_py_backend.config import dtypes, model_config, pbtxt
from torch_py_backend.config.model_config import ModelConfig, SequenceConfig, State
from torch_py_backend.errors import ConfigError

# `enum DataType` of Triton's model_config.proto, without TYPE_INVALID.
_TYPES = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16"


def test_names_of_types_are_those_of_triton() -> None:
    """The row `every_type` of scenarios.py compares them with torch's."""
    names = [dtype.config for dtype in dtypes.TABLE]
    assert sorted(names) == sorted(f"TYPE_{name}" for name in _TYPES.split())
    assert dtypes.parse("x", "TYPE_STRING") is dtypes.from_triton("BYTES")
    assert [dtypes.config_name(f"torch.{one.torch}") for one in dtypes.TABLE[:-1]] == names[:-1]


def parsed(**document: Any) -> ModelConfig:
    return model_config.parse(build.arguments(**document))


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "data_type": "TYPE_FP32", "dims": [4], **changes}


_COUNT = {"kind": "BATCH_ELEMENT_COUNT", "data_type": "TYPE_INT32", "source_input": ["x"]}
_SCALAR = dataclasses.replace(build.spec(dims=()), reshaped=True)
_STATE = State("past", "present", build.spec().dtype, (2, -1), (2, 1))


def batching(**settings: Any) -> dict[str, Any]:
    return {"sequence_batching": settings}


def state(**changes: Any) -> dict[str, Any]:
    names = {"input_name": "past", "output_name": "present"}
    return batching(state=[names | tensor(dims=[2, -1]) | changes])


@pytest.mark.parametrize(
    ("document", "path", "expected"),
    [
        # both settings of Triton's Python runtime; our backend's name is not one
        ({}, "python_runtime", False),
        ({"runtime": "model.py"}, "python_runtime", False),
        ({"platform": "pytorch"}, "python_runtime", True),
        ({"backend": "pytorch", "runtime": "model.py"}, "python_runtime", True),
        ({"instance_group": []}, "instances", 1),
        ({}, "dynamic_batching", False),
        ({"dynamic_batching": {}}, "dynamic_batching", True),
        ({"model_transaction_policy": {}}, "decoupled", False),
        ({"model_transaction_policy": {"decoupled": True}}, "decoupled", True),
        # Triton's empty default is None
        ({"default_model_filename": "./sub/a..b.pt"}, "default_model_filename", "./sub/a..b.pt"),
        ({"default_model_filename": ""}, "default_model_filename", None),
        # dims are those after Triton's reshape, which the model receives
        ({"output": [tensor(dims=[1], reshape={})]}, "outputs", (_SCALAR,)),
        ({"input": [tensor(reshape=None)]}, "inputs", (build.spec(),)),
        # each target is a tensor
        (
            {"batch_input": [_COUNT | {"target_name": ["n", "m"]}]},
            "batch_inputs",
            [f"{name} INT32 (BATCH_ELEMENT_COUNT of x)" for name in "nm"],
        ),
        # schedulers are Triton's
        (batching(), "sequencing", SequenceConfig(1.0, (), (), True, 8)),
        (batching(direct={}), "sequencing.direct", True),
        (
            batching(oldest={"max_candidate_sequences": 30}),
            "sequencing",
            SequenceConfig(1.0, (), (), False, 30),
        ),
        (batching(max_sequence_idle_microseconds="5000000"), "sequencing.idle_s", 5.0),
        # sizes of -1 are 1 at first, as in Triton
        (state(), "states", (_STATE,)),
        (state(initial_state=[{"dims": ["2", "0"]}]), "states", (_STATE._replace(initial=(2, 0)),)),
    ],
)
def test_setting_or_its_default(document: dict[str, Any], path: str, expected: object) -> None:
    """scenarios.py has rows of controls, states and batch_output."""
    found = operator.attrgetter(path)(parsed(**document))
    assert (list(map(str, found)) if isinstance(expected, list) else found) == expected


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
_DOCUMENTS: dict[str, dict[str, Any]] = {
    "unbatched": {"max_batch_size": 0},
    "stream": {"model_transaction_policy": {"decoupled": True}},
    "sequences": batching(),
    "state": state(),
    "state y": state(output_name="y", dims=[4]),
    "batch_input": {"batch_input": [_COUNT | {"target_name": ["n"]}]},
    "batch_output": {"batch_output": [{"target_name": ["y"], "source_input": ["x"]}]},
}


def named(settings: str, kind: str = "CPU", *, complete: bool = True) -> ModelConfig:
    """Parse a config with some options and settings of the tables above, by their names."""
    options: dict[str, str] = {}
    document: dict[str, Any] = {}
    for name in settings.split(" + "):
        if name in _OPTIONS:
            options |= _OPTIONS[name]
        else:
            document |= _DOCUMENTS[name]
    arguments = build.arguments(parameters=pbtxt.parameters(options), **document)
    return model_config.parse(arguments | {"model_instance_kind": kind}, complete=complete)


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
    with pytest.raises(ConfigError, match=re.escape(message)):
        named(settings, "GPU")
    named(settings, complete=False)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ("graphs + buckets", "GPU"),
        ("pad + state y", "CPU"),
        ("not compiled + shared + stream", "CPU"),
        ("compiled + batch_input", "CPU"),
    ],
)
def test_accepted_combination(settings: str, kind: str) -> None:
    assert named(settings, kind).kind == kind


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"cc_model_filenames": {"8.0": "a.pt"}}, "cc_model_filenames is set. Use default"),
        ({"output": []}, "config.pbtxt lists no inputs, or no outputs"),
        ({"input": [tensor(data_type="TYPE_BYTES")]}, "'x' has data_type TYPE_BYTES; expected"),
        (state(data_type="TYPE_INVALID"), "'past' has data_type TYPE_INVALID"),
    ],
)
def test_invalid_setting(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parsed(**document)
