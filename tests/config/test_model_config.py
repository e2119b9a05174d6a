"""Triton's arguments as a ModelConfig."""

from pathlib import Path
from typing import Any

import build
import pytest

from torch_py_backend.config import dtypes, model_config
from torch_py_backend.config.model_config import (
    BatchOutput,
    ModelConfig,
    SequenceConfig,
    State,
)


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


@pytest.mark.parametrize(
    ("document", "field", "expected"),
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
    ],
)
def test_setting_or_its_default(document: dict[str, Any], field: str, expected: object) -> None:
    assert getattr(parsed(**document), field) == expected


@pytest.mark.parametrize(
    ("changes", "dims"),
    [
        ({"dims": [4], "reshape": {"shape": [2, 2]}}, (2, 2)),
        ({"dims": [1], "reshape": {}}, ()),
        ({"dims": [4], "reshape": None}, (4,)),
    ],
)
def test_reshape(changes: dict[str, Any], dims: tuple[int, ...]) -> None:
    """Dims are those after Triton's reshape, which the model receives."""
    config = parsed(input=[tensor(**changes)], output=[tensor(**changes)])
    for spec in (*config.inputs, *config.outputs):
        assert spec.dims == dims
        assert spec.reshaped is (changes.get("reshape") is not None)


def test_each_target_of_batch_inputs_and_outputs_is_a_tensor() -> None:
    entry = {"target_name": ["n", "m"], "source_input": ["x"]}
    kind = {"kind": "BATCH_ELEMENT_COUNT", "data_type": "TYPE_INT32"}
    config = parsed(batch_input=[entry | kind], batch_output=[entry | {"target_name": ["y"]}])
    texts = ["n INT32 (BATCH_ELEMENT_COUNT of x)", "m INT32 (BATCH_ELEMENT_COUNT of x)"]
    assert [str(each) for each in config.batch_inputs] == texts
    assert config.batch_outputs == (BatchOutput("y", "x"),)


_FP32 = dtypes.from_triton("FP32")
_FILE = {"data_type": "TYPE_FP32", "dims": [2, 3], "data_file": "f"}
_BLOCK = {"input_name": "past", "output_name": "present"} | tensor(dims=[2, -1])
_ZEROS = {"name": "b", "data_type": "TYPE_FP32", "zero_data": True}


@pytest.mark.parametrize(
    ("batching", "idle_s", "direct", "most"),
    [
        ({}, 1.0, True, 8),
        ({"direct": {"max_queue_delay_microseconds": "500"}}, 1.0, True, 8),
        ({"oldest": {"max_candidate_sequences": 30}}, 1.0, False, 30),
        ({"max_sequence_idle_microseconds": "5000000"}, 5.0, True, 8),
    ],
)
def test_schedulers_are_triton_s(
    batching: dict[str, Any], idle_s: float, direct: bool, most: int
) -> None:
    config = parsed(sequence_batching=batching, max_batch_size=8)
    assert config.sequencing == SequenceConfig(idle_s, (), (), direct, most)


@pytest.mark.parametrize(
    ("control", "dtype"),
    [
        ({"int32_false_true": [0, 1]}, "INT32"),
        ({"bool_false_true": [False, True]}, "BOOL"),
        ({"fp32_false_true": [-1, 1]}, "FP32"),
        ({"data_type": "TYPE_UINT64"}, "UINT64"),
        ({"data_type": "TYPE_STRING"}, "BYTES"),
    ],
)
def test_controls(control: dict[str, Any], dtype: str) -> None:
    """The type of a control follows from the values that are set."""
    empty = {"int32_false_true": [], "fp32_false_true": [], "data_type": "TYPE_INVALID"}
    entry = {"name": "c", "control": [{**empty, **control}]}
    sequencing = parsed(sequence_batching={"control_input": [entry]}).sequencing
    assert sequencing is not None
    assert list(map(str, sequencing.controls)) == [f"c {dtype} [1] (control)"]


@pytest.mark.parametrize(
    ("initial", "sizes", "file"),
    [
        ([], (2, 1), None),  # undefined in Triton, zeros here
        ([_ZEROS | {"dims": [2, 3]}], (2, 3), None),
        ([_ZEROS | {"dims": ["2", "0"]}], (2, 0), None),
        ([_FILE], (2, 3), "f"),
    ],
)
def test_states(initial: list[Any], sizes: tuple[int, ...], file: str | None) -> None:
    """A state has the settings of its block; sizes of -1 are 1 at first, as in Triton."""
    config = parsed(sequence_batching={"state": [_BLOCK | {"initial_state": initial}]})
    assert config.states == (State("past", "present", _FP32, (2, -1), sizes, file),)
