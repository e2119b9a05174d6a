"""The command `torch-py-backend profile`."""

from __future__ import annotations

from pathlib import Path

import command_line
import models
import pytest
import ranges
import scenarios
from command_line import refuse, run
from scenarios import Scenario

from torch_py_backend.processes import child_process


def _model(folder: Path, code: str = "", **parameters: str) -> Path:
    text = scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters)
    code = code or models.source(models.Negate)
    return Scenario("negate", scenarios.text(code), text).lay_out(folder)


def test_profiled(process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of stages and operators are printed, and the trace is at the printed path."""
    monkeypatch.setattr(child_process, "run", command_line.here)
    model = _model(tmp_path)
    done = run("profile", str(model), "--batches=3", "--batch-size=2", "--memory", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = [line.split() for line in done.stdout.splitlines()]
    (batch,) = [words for words in printed if words[:1] == ["batch"]]
    assert (batch[1], batch[3]) == ("3", "100%")
    (negated,) = [words for words in printed if words[:2] == ["aten::neg", "3"]]
    assert float(negated[-1]) > 0
    assert "3 batches of 2 requests, each" in done.stdout
    assert "inputs: made-up values" in done.stdout
    path = tmp_path / "negate.trace.json.gz"
    assert f"wrote {path}\n" in done.stdout
    assert "https://ui.perfetto.dev" in done.stdout
    assert [stage.name for stage in ranges.read(path)].count("batch") == 3
    assert sorted(file.name for file in tmp_path.iterdir()) == ["negate", path.name]


@pytest.mark.slow
def test_a_process_that_dies(tmp_path: Path) -> None:
    """If the model ends its process, no trace is written and an older trace is kept."""
    model = _model(tmp_path, "import os\n\n\ndef forward(x):\n    os._exit(3)\n")
    (tmp_path / "old.json").write_text("older")
    text = "ended the process with exit code 3"
    refuse(text, "profile", str(model), "--output=old.json", cwd=tmp_path)
    assert (tmp_path / "old.json").read_text() == "older"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["negate", "old.json"]


def test_repository(tmp_path: Path) -> None:
    """A repository is refused with the names of its models, and nothing is written."""
    model = _model(tmp_path)
    text = f"{tmp_path} is a repository; name one of {model}."
    refuse(text, "profile", str(tmp_path), cwd=tmp_path)
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere is not a folder; expected a model's folder."),
        (["negate", "--inputs=no.safetensors"], "no.safetensors is not a file"),
        (["negate", "--output=trace.txt"], "expected a file whose name ends in .json or"),
        (["negate", "--output=/no/such/a.json"], "cannot write /no/such/a.json: No such"),
        (["negate", "--output=/dev/null/a.json"], "cannot write /dev/null/a.json: Not a"),
    ],
)
def test_bad_arguments(arguments: list[str], says: str, tmp_path: Path) -> None:
    """Bad arguments fail before anything is loaded."""
    _model(tmp_path, "raise SystemExit")
    refuse(says, "profile", *arguments, cwd=tmp_path)
    for option in ("--batches=0", "--batch-size=0"):
        assert run("profile", "negate", option, cwd=tmp_path).returncode == 2
    assert [file.name for file in tmp_path.iterdir()] == ["negate"]
