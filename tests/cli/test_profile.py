"""The command `torch-py-backend profile`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import ranges
import scenarios
from scenarios import Scenario
from typer.testing import CliRunner

from torch_py_backend import cli
from torch_py_backend.errors import ProfileError

_COMMAND = (sys.executable, "-c", "from torch_py_backend.cli import app; app()", "profile")
_ENVIRONMENT = os.environ | {"COLUMNS": "200", "TERM": "dumb"}


def _profile(folder: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=_ENVIRONMENT,
    )


def _model(folder: Path, code: str = "", **parameters: str) -> Path:
    text = scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters)
    code = code or models.source(models.Negate)
    return Scenario("negate", scenarios.text(code), text).lay_out(folder)


@pytest.mark.slow
def test_profiled(tmp_path: Path) -> None:
    """Tables of stages and operators are printed, and the trace is at the printed path."""
    finished = _profile(tmp_path, _model(tmp_path), "--batches=3", "--batch-size=2")
    assert finished.returncode == 0, finished.stderr
    printed = [line.split() for line in finished.stdout.splitlines()]
    (batch,) = [words for words in printed if words[:1] == ["batch"]]
    assert batch[1] == "3"
    assert batch[3] == "100%"
    assert any(words[:2] == ["aten::neg", "3"] for words in printed)
    assert "3 batches of 2 requests, each" in finished.stdout
    assert "inputs: made-up values" in finished.stdout
    path = tmp_path / "negate.trace.json.gz"
    assert f"wrote {path}\n" in finished.stdout
    assert "https://ui.perfetto.dev" in finished.stdout
    assert [stage.name for stage in ranges.read(path)].count("batch") == 3
    assert sorted(file.name for file in tmp_path.iterdir()) == ["negate", path.name]


@pytest.mark.slow
def test_a_process_that_dies(tmp_path: Path) -> None:
    """If the model ends its process, no trace is written and an older trace is kept."""
    code = "import os\n\n\ndef forward(x):\n    os._exit(3)\n"
    (tmp_path / "old.json").write_text("older")
    finished = _profile(tmp_path, _model(tmp_path, code), "--output=old.json")
    assert finished.returncode == 1
    assert "ended the process with exit code 3" in finished.stderr
    assert (tmp_path / "old.json").read_text() == "older"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["negate", "old.json"]


def test_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository is refused with the names of its models, and nothing is written."""
    model = _model(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.commands, ["profile", str(tmp_path)])
    assert f"{tmp_path} is a repository; name one of {model}." in str(result.exception)
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder; expected a model's folder."),
        (["negate", "--inputs=no.safetensors"], "no.safetensors is not a file"),
        (["negate", "--output=trace.txt"], "expected a file whose name ends in .json or"),
        (["negate", "--output=/no/such/a.json"], "cannot write into /no/such: No such file"),
        (["negate", "--output=/proc/a.json"], "cannot write into /proc"),
        (["negate", "--output=/dev/null/a.json"], "cannot write into /dev/null: Not a dir"),
        (["negate", "--batches=0"], "Invalid value for '--batches'"),
        (["negate", "--batch-size=0"], "Invalid value for '--batch-size'"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad arguments fail before anything is loaded."""
    _model(tmp_path, "raise SystemExit")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.commands, ["profile", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code
    assert message in " ".join(f"{result.output} {result.exception}".split())
    assert isinstance(result.exception, ProfileError | SystemExit)
    assert [file.name for file in tmp_path.iterdir()] == ["negate"]
