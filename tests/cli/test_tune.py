"""`torch-py-backend tune`: with real measurements, and with simulated ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import command_line
import models
import pytest
import torch

from torch_py_backend.errors import LoadError
from torch_py_backend.model_folders import tuning
from torch_py_backend.processes import child_process

_CONFIG = """# mine
backend: "pytorch_py"
max_batch_size: 2
input [{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }]
"""
_SETTING = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'


def _model(folder: Path, text: str = _CONFIG) -> Path:
    """TorchScript has the fewest candidates, and none is compiled."""
    (folder / "negate" / "1").mkdir(parents=True)
    torch.jit.save(torch.jit.script(models.Negate()), folder / "negate" / "1" / "model.pt")
    (folder / "negate" / "config.pbtxt").write_text(text)
    return folder / "negate"


class _Measured:
    """Simulated measurements: the speed and the error of each model are those of its OPTIMIZE."""

    def __init__(self) -> None:
        self.kind = "TORCHSCRIPT"
        self.speeds = {"freeze": 2.0}
        self.errors: dict[str, float] = {}

    def run(
        self, _task: str, arguments: dict[str, Any], _seconds: float, *, quiet: bool
    ) -> dict[str, Any]:
        parameters = json.loads(arguments["arguments"]["model_config"])["parameters"]
        optimize = parameters.get("OPTIMIZE", {}).get("string_value", "")
        if optimize == "channels_last":
            raise LoadError("it hangs [/]")
        speed = self.speeds.get(optimize, 1.0)
        return {
            "kind": self.kind,
            "ms": 1 / speed,
            "rows_per_s": 2000 * speed,
            "gains": [speed, speed],
            "ready_s": 1.0,
            "error": self.errors.get(optimize, 0.0),
        }


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> _Measured:
    """Simulated measurements, in which `freeze` is twice as fast."""
    measured = _Measured()
    monkeypatch.setattr(child_process, "run", measured.run)
    return measured


@pytest.mark.usefixtures("process")
def test_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real figures; the config is not written without --write."""
    monkeypatch.setattr(child_process, "run", command_line.here)
    monkeypatch.setattr(tuning, "_SECONDS", 0.01)
    model = _model(tmp_path)
    done = command_line.run("tune", str(model))
    assert "batches of 2 rows" in done.stdout, done.stderr
    for title in ("as configured", "channels_last", "freeze"):
        row = next(line for line in done.stdout.splitlines() if line.startswith(title))
        latency, *_, error = row.removeprefix(title).split()
        assert (float(latency) > 0, error) == (True, "0")
    assert (model / "config.pbtxt").read_text() == _CONFIG


@pytest.mark.usefixtures("simulated")
def test_choice(tmp_path: Path) -> None:
    """Its lines are printed; config.pbtxt is not changed."""
    text = _CONFIG + _SETTING.format("OPTIMIZE", "none")
    model = _model(tmp_path, text)
    done = command_line.run("tune", str(model))
    assert "it hangs [/]." in done.stdout
    assert f"fastest: freeze; set in {model / 'config.pbtxt'}, in place of\n" in done.stdout
    assert done.stdout.endswith(_SETTING.format("OPTIMIZE", "freeze"))
    assert (model / "config.pbtxt").read_text() == text


@pytest.mark.parametrize(
    ("speed", "error", "options", "says"),
    [
        (2.0, 1e-5, (), "fastest: freeze"),
        (2.0, 1e-3, (), "nothing is faster"),
        (2.0, 1e-3, ("--reduced-precision",), "fastest: freeze"),
        (1.02, 0.0, (), "nothing is faster"),
    ],
)
def test_a_candidate_without_a_gain_or_with_other_outputs(
    speed: float,
    error: float,
    options: tuple[str, ...],
    says: str,
    simulated: _Measured,
    tmp_path: Path,
) -> None:
    simulated.speeds["freeze"], simulated.errors["freeze"] = speed, error
    done = command_line.run("tune", str(_model(tmp_path)), *options)
    assert says in done.stdout


def test_runtimes_that_suit(simulated: _Measured, tmp_path: Path) -> None:
    simulated.kind = "MODULE"
    model = _model(tmp_path)
    plain = command_line.run("tune", str(model)).stdout
    assert "compile, freezing" in plain
    assert "compile, fixed sizes" in plain
    assert "bf16" not in plain
    reduced = command_line.run("tune", str(model), "--reduced-precision").stdout
    assert "compile, freezing, bf16" in reduced
    assert "CUDA graphs" not in reduced


@pytest.mark.usefixtures("simulated")
def test_a_decoupled_model_is_refused(tmp_path: Path) -> None:
    model = _model(tmp_path, f"{_CONFIG}model_transaction_policy {{ decoupled: true }}")
    command_line.refuse("the model is decoupled", "tune", str(model))
