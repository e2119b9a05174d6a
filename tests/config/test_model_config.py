"""Triton's arguments as a ModelConfig."""

import operator
from pathlib import Path
from typing import Any

import build
import pytest

from torch_py_backend.config import dtypes, model_config
from torch_py_backend.config.model_config import ModelConfig, SequenceConfig, State

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


def test_parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ModelConfig contains all facts of Triton's arguments; a relative folder becomes absolute."""
    monkeypatch.chdir(tmp_path)
    arguments = build.arguments(
        max_batch_size=16,
        input=[
            tensor(name="image", data_type="TYPE_UINT8", dims=[3, -1, -1]),
            tensor(name="size", data_type="TYPE_INT64", dims=[2]),
        ],
        output=[tensor(name="class", data_type="TYPE_BF16", dims=[10])],
        instance_group=[{"kind": "KIND_GPU", "count": 2, "gpus": [0, 3]}],
        default_model_filename="net.pt",
        parameters={"WARMUP": {"string_value": "off"}},
    )
    instance = {"name": "digits_0_1", "kind": "GPU", "device_id": "3"}
    arguments |= {f"model_instance_{key}": value for key, value in instance.items()}
    arguments |= {"model_repository": "models/digits", "model_version": "7"}
    config = model_config.parse(arguments)
    assert config == build.config(
        tmp_path / "models" / "digits",
        version="7",
        instance="digits_0_1",
        kind="GPU",
        device_id=3,
        instances=4,
        max_batch_size=16,
        inputs=(build.spec("image", "UINT8", (3, -1, -1)), build.spec("size", "INT64", (2,))),
        outputs=(build.spec("class", "BF16", (10,)),),
        default_model_filename="net.pt",
        warmup=False,
    )
    assert config.version_folder == tmp_path / "models" / "digits" / "7"


_KIND = {"kind": "BATCH_ELEMENT_COUNT", "data_type": "TYPE_INT32", "target_name": ["n", "m"]}
_SCATTER = {"target_name": ["y"], "source_input": ["x"]}


def batching(**settings: Any) -> dict[str, Any]:
    return {"sequence_batching": settings}


def control(**values: Any) -> dict[str, Any]:
    empty = {"int32_false_true": [], "fp32_false_true": [], "data_type": "TYPE_INVALID"}
    return batching(control_input=[{"name": "c", "control": [empty | values]}])


def state(*initial: dict[str, Any]) -> dict[str, Any]:
    names = {"input_name": "past", "output_name": "present"}
    return batching(state=[names | tensor(dims=[2, -1]) | {"initial_state": initial}])


def kept(initial: tuple[int, ...], file: str | None = None) -> tuple[State, ...]:
    return (State("past", "present", dtypes.from_triton("FP32"), (2, -1), initial, file),)


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
        ({"input": [tensor(reshape={"shape": [2, 2]})]}, "inputs", ["x FP32 [2, 2]"]),
        ({"output": [tensor(dims=[1], reshape={})]}, "outputs", ["x FP32 []"]),
        ({"input": [tensor(reshape=None)]}, "inputs", ["x FP32 [4]"]),
        # each target is a tensor
        (
            {"batch_input": [_KIND | {"source_input": ["x"]}]},
            "batch_inputs",
            [f"{name} INT32 (BATCH_ELEMENT_COUNT of x)" for name in "nm"],
        ),
        ({"batch_output": [_SCATTER]}, "batch_outputs", {"y": "x"}),
        # schedulers are Triton's
        (batching(), "sequencing", SequenceConfig(1.0, (), (), True, 8)),
        (batching(direct={}), "sequencing.direct", True),
        (
            batching(oldest={"max_candidate_sequences": 30}),
            "sequencing",
            SequenceConfig(1.0, (), (), False, 30),
        ),
        (batching(max_sequence_idle_microseconds="5000000"), "sequencing.idle_s", 5.0),
        # the type of a control follows from the values that are set
        (control(int32_false_true=[0, 1]), "sequencing.controls", ["c INT32 [1] (control)"]),
        (control(bool_false_true=[False, True]), "sequencing.controls", ["c BOOL [1] (control)"]),
        (control(fp32_false_true=[-1, 1]), "sequencing.controls", ["c FP32 [1] (control)"]),
        (control(data_type="TYPE_STRING"), "sequencing.controls", ["c BYTES [1] (control)"]),
        # sizes of -1 are 1 at first, as in Triton; undefined there, zeros here
        (state(), "states", kept((2, 1))),
        (state(tensor(zero_data=True, dims=["2", "0"])), "states", kept((2, 0))),
        (state(tensor(dims=[2, 3], data_file="f")), "states", kept((2, 3), "f")),
    ],
)
def test_setting_or_its_default(document: dict[str, Any], path: str, expected: object) -> None:
    found = operator.attrgetter(path)(parsed(**document))
    assert (list(map(str, found)) if isinstance(expected, list) else found) == expected


@pytest.mark.parametrize("reshape", [{"shape": [2, 2]}, None])
def test_a_reshape_is_noted(reshape: Any) -> None:
    config = parsed(input=[tensor(reshape=reshape)], output=[tensor(reshape=reshape)])
    assert [spec.reshaped for spec in (*config.inputs, *config.outputs)] == [bool(reshape)] * 2
