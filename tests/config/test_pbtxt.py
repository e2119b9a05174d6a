import dataclasses
import sys
from pathlib import Path
from typing import Any

import build
import pytest

from torch_py_backend.config import model_config, pbtxt
from torch_py_backend.errors import ConfigError, PlatformError

_TYPICAL = """
# A comment with a "quote" and a [bracket]
backend: "pytorch_py"  # behind a field
max_batch_size: 8
default_model_filename: "net.pt"
input [
  { name: "größe" data_type: TYPE_FP32 dims: [ -1, 4 ] },
  { name: "flag" data_type: TYPE_BOOL dims: [ 1 ] reshape { shape: [ ] } optional: true }
]
output { name: "y" data_type: TYPE_STRING dims: 9007199254740993 reshape { shape: [ 3, 1 ] } }
parameters { key: "METHOD" value { string_value: "encode" } }
instance_group [{ kind: KIND_GPU count: 2 gpus: [ 1, 3 ] }, { }]
"""


def _read(folder: Path, text: str | bytes) -> dict[str, Any]:
    model = folder / "digits"
    model.mkdir(exist_ok=True)
    content = text.encode() if isinstance(text, str) else text
    (model / "config.pbtxt").write_bytes(content)
    return pbtxt.read(model)


def test_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields have Triton's names, sizes are integers; Triton's arguments are strings of that.

    A ModelConfig has all facts of the arguments; a relative folder becomes absolute.
    """
    document = _read(tmp_path, _TYPICAL)
    assert document["output"][0]["dims"] == [9007199254740993]
    monkeypatch.chdir(tmp_path)
    arguments = pbtxt.arguments(Path("digits"), "3", document)
    assert all(isinstance(value, str) for value in arguments.values())
    config = model_config.parse(arguments)
    flag, y = build.spec("flag", "BOOL", ()), build.spec("y", "BYTES", (3, 1))
    assert config == build.config(
        tmp_path / "digits",
        version="3",
        # A group has at least one instance; the device is that of the first one.
        kind="GPU",
        device_id=1,
        instances=5,
        inputs=(
            build.spec("größe", dims=(-1, 4)),
            dataclasses.replace(flag, optional=True, reshaped=True),
        ),
        outputs=(dataclasses.replace(y, reshaped=True),),
        default_model_filename="net.pt",
        method="encode",
    )
    assert config.version_folder == tmp_path / "digits" / "3"


def test_no_file_and_an_empty_one_have_triton_s_defaults(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    document = pbtxt.read(tmp_path / "digits")
    assert (document["name"], document["max_batch_size"]) == ("digits", 0)
    assert document["input"] == document["output"] == []
    assert document["parameters"] == {}
    assert pbtxt.arguments(tmp_path / "digits", "1", document)["model_instance_kind"] == "CPU"
    assert _read(tmp_path, "# nothing\n") == document


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size: 8\ninput [{ name: x }]\n", "cannot be read: .*2:"),
        ('backend: "pytorch_py"\nbatch_size: 8\n', 'cannot be read: .* named "batch_size"'),
        ("input [{ dims: [ 99999999999999999999 ] }]", "cannot be read: .*1:"),
        (b"PK\x03\x04\x00\xff", "cannot be read: .*utf-8"),
        ('name: "letters"', "is of 'letters'; expected 'digits'"),
    ],
)
def test_file_that_triton_refuses(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.pbtxt {message}"):
        _read(tmp_path, text)


def test_without_protobuf_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tritonclient.grpc", "google.protobuf"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(PlatformError, match=r"pip install .*\[serve\]"):
                _read(tmp_path, _TYPICAL)
