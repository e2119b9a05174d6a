"""`torch-py-backend profile` as a command."""

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
    """Tables of stages and operators, and a trace where it says that it is."""
    done = _profile(tmp_path, _model(tmp_path), "--batches=3", "--batch-size=2")
    assert done.returncode == 0, done.stderr
    printed = [line.split() for line in done.stdout.splitlines()]
    (batch,) = [words for words in printed if words[:1] == ["batch"]]
    assert batch[1] == "3"
    assert batch[3] == "100%"
    assert any(words[:2] == ["aten::neg", "3"] for words in printed)
    assert "3 batches of 2 requests, each" in done.stdout
    assert "inputs: made-up values" in done.stdout
    path = tmp_path / "negate.trace.json.gz"
    assert f"wrote {path}\n" in done.stdout
    assert "https://ui.perfetto.dev" in done.stdout
    assert [one.name for one in ranges.read(path)].count("batch") == 3
    assert sorted(one.name for one in tmp_path.iterdir()) == ["negate", path.name]


@pytest.mark.slow
def test_a_process_that_dies(tmp_path: Path) -> None:
    """A model that takes its process with it leaves no trace, and an older one as it was."""
    code = "import os\n\n\ndef forward(x):\n    os._exit(3)\n"
    (tmp_path / "old.json").write_text("older")
    done = _profile(tmp_path, _model(tmp_path, code), "--output=old.json")
    assert done.returncode == 1
    assert "ended the process with exit code 3" in done.stderr
    assert (tmp_path / "old.json").read_text() == "older"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["negate", "old.json"]


def test_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository is no model: the models in it are named, and nothing is left."""
    model = _model(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.commands, ["profile", str(tmp_path)])
    assert f"{tmp_path} is a repository; name one of {model}." in str(done.exception)
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize(
    ("arguments", "says"),
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
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be is said before anything is loaded."""
    _model(tmp_path, "raise SystemExit")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.commands, ["profile", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code
    assert says in " ".join(f"{done.output} {done.exception}".split())
    assert isinstance(done.exception, ProfileError | SystemExit)
    assert [one.name for one in tmp_path.iterdir()] == ["negate"]
