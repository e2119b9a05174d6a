"""`torch-py-backend tune` with simulated measurements; tests/model_folders has real ones."""

from __future__ import annotations

import inspect
import json
import pkgutil
from pathlib import Path
from typing import Any

import command_line
import pytest

from torch_py_backend.errors import LoadError
from torch_py_backend.model_folders import tuning
from torch_py_backend.processes import child_process

_CONFIG = """# mine
backend: "pytorch_py"
max_batch_size: 2
input [{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }]
"""
_DECOUPLED = f"{_CONFIG}model_transaction_policy {{ decoupled: true }}"
_SETTING = 'parameters {{ key: "OPTIMIZE" value {{ string_value: "{}" }} }}\n'


def _tune(folder: Path, *options: str, text: str = _CONFIG, **given: Any) -> str:
    """Return what is printed. The speed and the error are those of `freeze`."""

    def run(task: str, arguments: dict[str, Any], _seconds: float, *, quiet: bool) -> Any:
        inspect.signature(pkgutil.resolve_name(task)).bind(**arguments)
        assert task.endswith(tuning.measure.__name__)
        parameters = json.loads(arguments["arguments"]["model_config"])["parameters"]
        optimize = parameters.get("OPTIMIZE", {}).get("string_value", "")
        if optimize == "channels_last":
            raise LoadError("it hangs [/]")
        is_fast = optimize == "freeze"
        gain = given.get("speed", 2.0) if is_fast else 1.0
        return {
            "kind": given.get("kind", "TORCHSCRIPT"),
            "ms": 1 / gain,
            "rows_per_s": 2000 * gain,
            "gains": [gain, gain],
            "ready_s": 1.0,
            "error": given.get("error", 0.0) if is_fast else 0.0,
        }

    (folder / "net" / "1").mkdir(parents=True, exist_ok=True)
    (folder / "net" / "config.pbtxt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "run", run)
        done = command_line.run("tune", *options, str(folder / "net"))
    assert (folder / "net" / "config.pbtxt").read_text() == text
    return done.stdout + done.stderr


def test_options_of_the_fastest_are_printed(tmp_path: Path) -> None:
    printed = _tune(tmp_path, text=_CONFIG + _SETTING.format("none"))
    header, _, *rows = printed.splitlines()
    assert "batches of 2 rows" in header
    assert [row.split()[:2] for row in rows[:3]] == [
        ["as", "configured"],
        ["channels_last", "it"],
        ["freeze", "0.5"],
    ]
    assert "it hangs [/]." in printed
    path = tmp_path / "net" / "config.pbtxt"
    assert f"fastest: freeze; set in {path}, in place of\n" in printed
    assert printed.endswith(_SETTING.format("freeze"))


@pytest.mark.parametrize(
    ("options", "settings", "says", "does_not_say"),
    [
        ("", {"error": 1e-5}, "fastest: freeze", "nothing is faster"),
        ("", {"error": 1e-3}, "nothing is faster", "fastest"),
        ("--reduced-precision", {"error": 1e-3}, "fastest: freeze", "nothing is faster"),
        ("", {"speed": 1.02}, "nothing is faster", "fastest"),
        ("", {"kind": "MODULE"}, "compile, fixed sizes", "bf16"),
        ("--reduced-precision", {"kind": "MODULE"}, "compile, freezing, bf16", "CUDA graphs"),
        ("", {"text": _DECOUPLED}, "the model is decoupled", "fastest"),
    ],
)
def test_what_suits_the_model_is_tried_and_what_is_faster_and_right_is_named(
    options: str, settings: dict[str, Any], says: str, does_not_say: str, tmp_path: Path
) -> None:
    printed = _tune(tmp_path, *options.split(), **settings)
    assert says in printed
    assert does_not_say not in printed
