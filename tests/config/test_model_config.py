from collections.abc import Mapping
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


def test_parse() -> None:
    """ModelConfig contains all facts of Triton's arguments."""
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
        "model_version": "7",
        "model_instance_name": "digits_0_1",
        "model_instance_kind": "GPU",
        "model_instance_device_id": "3",
    }

    config = model_config.parse(arguments)

    assert config == ModelConfig(
        name="digits",
        folder=Path("/models/digits"),
        version="7",
        instance="digits_0_1",
        kind="GPU",
        device_id=3,
        instances=4,
        max_batch_size=16,
        inputs=(
            build.spec("image", "UINT8", (3, -1, -1)),
            build.spec("size", "INT64", (2,)),
        ),
        outputs=(build.spec("class", "BF16", (10,)),),
        default_model_filename="net.pt",
        python_runtime=False,
        options=Options(warmup=False),
    )
    assert config.version_folder == Path("/models/digits/7")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, False),
        ({"runtime": "model.py"}, False),
        ({"platform": "pytorch"}, True),
        ({"backend": "pytorch", "runtime": "model.py"}, True),
    ],
)
def test_python_runtime(document: dict[str, str], expected: bool) -> None:
    """Both settings of Triton's Python runtime are recognized; our backend name is not one."""
    assert model_config.parse(build.arguments(**document)).python_runtime is expected


def test_folder_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative repository becomes an absolute folder."""
    monkeypatch.chdir(tmp_path)

    config = model_config.parse({**build.arguments(), "model_repository": "models/digits"})

    assert config.folder == tmp_path / "models" / "digits"


@pytest.mark.parametrize("role", ["input", "output"])
@pytest.mark.parametrize(
    ("changes", "dims"),
    [
        ({"dims": []}, ()),
        ({"dims": [4], "reshape": {"shape": [2, 2]}}, (2, 2)),
        ({"dims": [1], "reshape": {}}, ()),
        ({"dims": [4], "reshape": None}, (4,)),
    ],
)
def test_reshape(role: str, changes: Mapping[str, Any], dims: tuple[int, ...]) -> None:
    """Dims are those after Triton's reshape, which the model receives."""
    config = parsed(**{role: [tensor(**changes)]})

    (spec,) = config.inputs if role == "input" else config.outputs
    assert spec.dims == dims
    assert spec.reshaped is (changes.get("reshape") is not None)


@pytest.mark.parametrize(
    ("groups", "instances"),
    [
        ([], 1),
        ([{"count": 3, "gpus": []}], 3),
        ([{"count": 2, "gpus": [0, 1, 2]}], 6),
        ([{"count": 2}, {"count": 1, "gpus": [5]}], 3),
    ],
)
def test_instances(groups: list[Any], instances: int) -> None:
    """Instances of all groups are counted; the count of a group is per GPU."""
    assert parsed(instance_group=groups).instances == instances


@pytest.mark.parametrize("role", ["input", "output"])
def test_config_without_tensors(role: str) -> None:
    """A config without inputs or outputs is accepted only while it is completed."""
    with pytest.raises(ConfigError) as raised:
        parsed(**{role: []})

    assert f"'digits': config.pbtxt lists no {role}; expected at least one" in str(raised.value)
    incomplete = model_config.parse(build.arguments(**{role: []}), complete=False)
    assert (incomplete.inputs, incomplete.outputs) == ((), ())


@pytest.mark.parametrize("role", ["input", "output"])
def test_unknown_type(role: str) -> None:
    """Unknown types are rejected; the error lists the supported ones."""
    with pytest.raises(ConfigError) as raised:
        parsed(**{role: [tensor(name="text", data_type="TYPE_BYTES")]})

    text = str(raised.value)
    assert f"'digits': {role} 'text' has data_type TYPE_BYTES; expected one of TYPE_BOOL" in text


def test_settings_of_a_tensor() -> None:
    """An input is optional or ragged only if the config says so."""
    config = parsed(
        input=[
            tensor(),
            tensor(name="mask", optional=True),
            tensor(name="ids", data_type="TYPE_STRING", allow_ragged_batch=True),
        ]
    )

    assert [spec.optional for spec in config.inputs] == [False, True, False]
    assert [spec.ragged for spec in config.inputs] == [False, False, True]
    assert str(config.inputs[-1]) == "ids BYTES [4]"


def test_setting_without_effect() -> None:
    """cc_model_filenames, which has no effect, is rejected."""
    with pytest.raises(ConfigError) as raised:
        parsed(cc_model_filenames={"8.0": "a.pt"})

    assert str(raised.value).startswith("model 'digits': ")
    assert "Remove cc_model_filenames from config.pbtxt." in str(raised.value)


@pytest.mark.parametrize(
    ("policy", "decoupled"),
    [({}, False), ({"decoupled": False}, False), ({"decoupled": True}, True)],
)
def test_decoupled(policy: dict[str, bool], decoupled: bool) -> None:
    """The transaction policy of the config decides whether a model is decoupled."""
    assert parsed(model_transaction_policy=policy).decoupled is decoupled


@pytest.mark.parametrize(
    "block",
    [
        {"dynamic_batching": {"max_queue_delay_microseconds": 100}},
        {"model_transaction_policy": {"decoupled": False}},
        {"response_cache": {"enable": True}},
        {"model_warmup": [{"name": "w"}]},
    ],
    ids=lambda block: next(iter(block)),
)
def test_settings_of_the_core(block: dict[str, Any]) -> None:
    """Settings for Triton's core are ignored."""
    assert parsed(**block) == parsed()


@pytest.mark.parametrize("name", ["net.pt", "sub/net.py", "./net.py", "a..b.pt", ""])
def test_model_file(name: str) -> None:
    """The artifact may have any name in the version folder; Triton's empty default is None."""
    assert parsed(default_model_filename=name).default_model_filename == (name or None)


@pytest.mark.parametrize("name", ["../2/model.pt", "/etc/passwd", ".."])
def test_model_file_outside_the_version_folder(name: str) -> None:
    """A name outside the version folder is rejected."""
    with pytest.raises(ConfigError) as raised:
        parsed(default_model_filename=name)

    assert f"'digits': default_model_filename is '{name}'" in str(raised.value)
    assert "expected a file in the version folder" in str(raised.value)
