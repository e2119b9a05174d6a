"""Triton's arguments as a ModelConfig."""

import dataclasses
from pathlib import Path
from typing import Any

import build
import pytest

from torch_py_backend.config import model_config
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.config.options import Options
from torch_py_backend.errors import ConfigError


def parsed(**document: Any) -> ModelConfig:
    return model_config.parse(build.arguments(**document))


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "data_type": "TYPE_FP32", "dims": [4], **changes}


def test_parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ModelConfig contains all facts of Triton's arguments; a relative folder becomes absolute."""
    monkeypatch.chdir(tmp_path)
    arguments = {
        **build.arguments(
            max_batch_size=16,
            input=[
                tensor(name="image", data_type="TYPE_UINT8", dims=[3, -1, -1]),
                tensor(name="size", data_type="TYPE_INT64", dims=[2]),
            ],
            output=[tensor(name="class", data_type="TYPE_BF16", dims=[10])],
            instance_group=[{"kind": "KIND_GPU", "count": 2, "gpus": [0, 3]}],
            default_model_filename="net.pt",
            parameters={"WARMUP": {"string_value": "off"}},
        ),
        "model_repository": "models/digits",
        "model_version": "7",
        "model_instance_name": "digits_0_1",
        "model_instance_kind": "GPU",
        "model_instance_device_id": "3",
    }
    config = model_config.parse(arguments)
    assert config == ModelConfig(
        name="digits",
        folder=tmp_path / "models" / "digits",
        version="7",
        instance="digits_0_1",
        kind="GPU",
        device_id=3,
        instances=4,
        max_batch_size=16,
        inputs=(build.spec("image", "UINT8", (3, -1, -1)), build.spec("size", "INT64", (2,))),
        outputs=(build.spec("class", "BF16", (10,)),),
        default_model_filename="net.pt",
        python_runtime=False,
        options=Options(warmup=False),
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
        ({"model_transaction_policy": {}}, "decoupled", False),
        ({"model_transaction_policy": {"decoupled": True}}, "decoupled", True),
        # any name in the version folder; Triton's empty default is None
        ({"default_model_filename": "./sub/a..b.pt"}, "default_model_filename", "./sub/a..b.pt"),
        ({"default_model_filename": ""}, "default_model_filename", None),
    ],
)
def test_setting(document: dict[str, Any], field: str, expected: object) -> None:
    """Each setting is read, with Triton's default."""
    assert getattr(parsed(**document), field) == expected


@pytest.mark.parametrize(
    ("changes", "dims"),
    [
        ({"dims": []}, ()),
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


@pytest.mark.parametrize("role", ["input", "output"])
def test_invalid_tensors(role: str) -> None:
    """A config without tensors is accepted only for its completion; unknown types never are."""
    with pytest.raises(ConfigError, match=rf"config.pbtxt lists no {role}; expected at"):
        parsed(**{role: []})
    incomplete = model_config.parse(build.arguments(**{role: []}), complete=False)
    assert (incomplete.inputs, incomplete.outputs) == ((), ())
    text = rf"{role} 'x' has data_type TYPE_BYTES; expected one of TYPE_BOOL"
    with pytest.raises(ConfigError, match=text):
        parsed(**{role: [tensor(data_type="TYPE_BYTES")]})


def test_settings_of_a_tensor() -> None:
    """An input is optional or ragged only if the config says so."""
    ids = tensor(name="ids", data_type="TYPE_STRING", allow_ragged_batch=True)
    config = parsed(input=[tensor(), tensor(name="mask", optional=True), ids])
    assert [spec.optional for spec in config.inputs] == [False, True, False]
    assert [spec.ragged for spec in config.inputs] == [False, False, True]
    assert str(config.inputs[-1]) == "ids BYTES [4]"


def test_settings_of_the_core() -> None:
    """Settings for Triton's core are ignored, except whether it forms batches."""
    assert parsed() == parsed(model_warmup=[{"name": "w"}])
    batching = parsed(dynamic_batching={"max_queue_delay_microseconds": 100})
    assert batching == dataclasses.replace(parsed(), dynamic_batching=True)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"cc_model_filenames": {"8.0": "a.pt"}}, "Remove cc_model_filenames from config.pbtxt."),
        *(
            ({"default_model_filename": name}, f"is '{name}'; expected a file in the version fold")
            for name in ("../2/model.pt", "/etc/passwd", "..")
        ),
    ],
)
def test_refused_setting(document: dict[str, Any], message: str) -> None:
    """A setting without effect, and a file outside the version folder, are rejected."""
    with pytest.raises(ConfigError) as raised:
        parsed(**document)
    assert message in str(raised.value)
