"""`check`: models tried without a server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import models
import pytest
import scenarios
import typer
from command_line import run, tree

from torch_py_backend.cli.check import check
from torch_py_backend.processes import child_process
from torch_py_backend.server import preflight

_APP = "from torch_py_backend.cli import app; app()"
_NEGATE = models.source(models.Negate)
_COMPLETE = scenarios.x_to_y()
_BARE = 'backend: "pytorch_py"\n'
_GAPS = (
    _NEGATE
    + """

def example_inputs():
    return {"x": torch.rand(2, 4)}
"""
)
_HANGS = (
    _NEGATE
    + """

def example_inputs():
    while True:
        pass
"""
)
# Whatever it does when it is imported, it can be served.
_NOISY = (
    """
import os
import tempfile

print("x" * 2_000_000)
print('{"models": []}')
os.write(1, b"written")
for number in (0, 1):
    os.close(number)
if os.fork() == 0:
    os._exit(9)
os.chdir(tempfile.gettempdir())
"""
    + _NEGATE
)
_RAISES = """
from helper import refuse
from torch import Tensor, nn


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return refuse(x)


def example_inputs():
    import torch

    return {"x": torch.rand(2, 4)}
"""
_REFUSE = """
import torch


def refuse(x):
    return torch.relu(x) @ torch.ones(3, 2)
"""
_LIMIT = 'parameters { key: "AUTO_COMPLETE_TIMEOUT_S" value { string_value: "1" } }\n'
_MODELS: dict[str, tuple[str | bytes, str]] = {
    "good": (_COMPLETE, _NEGATE),
    "gaps [red] ü": (_BARE, _GAPS),
    "noisy": (_COMPLETE, _NOISY),
    "no_backend": (_COMPLETE.replace(_BARE, ""), _NEGATE),
    "misspelt": (_COMPLETE.replace("pytorch_py", "pytorch-py"), _NEGATE),
    "other": ('backend: "python"\n', _NEGATE),
    "typo": (_COMPLETE + _LIMIT.replace("AUTO", "AUTOMATIC"), _NEGATE),
    "broken_config": ('backend: "pytorch_py"\ninput [{ name: }]\n', _NEGATE),
    "latin": ("# café\n".encode("latin-1"), _NEGATE),
    "broken_source": (_COMPLETE, "def broken(:\n"),
    "exits": (_COMPLETE, "import os\n\nos._exit(7)\n"),
    "hangs": (_BARE + _LIMIT, _HANGS),
    "no_versions": (_COMPLETE, ""),
    "raises": (_COMPLETE, _RAISES),
    "raises_in_completion": (_BARE, _RAISES),
}


def _lay_out(repository: Path, *names: str) -> Path:
    for name in names:
        text, source = _MODELS[name]
        (repository / name / "1").mkdir(parents=True)
        content = text.encode() if isinstance(text, str) else text
        (repository / name / "config.pbtxt").write_bytes(content)
        (repository / name / "1" / "model.py").write_text(source)
        if source == _RAISES:
            (repository / name / "1" / "helper.py").write_text(_REFUSE)
        if not source:
            (repository / name / "1" / "model.py").unlink()
            (repository / name / "1").rmdir()
    return repository


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `check --json` prints on a repository of good and of broken models."""
    folder = tmp_path_factory.mktemp("check")
    repository = _lay_out(folder / "repository", *_MODELS.keys() - {"good", "raises"})
    (repository / "notes.txt").write_text("no model")
    (repository / "broken link").symlink_to("/no/such/model")
    done = run("check", "--json", "repository", cwd=folder)
    assert done.returncode == 1, done.stderr[-2000:]
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _model(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(model for model in report["models"] if model["model"] == name)


def test_every_model_is_reported(report: dict[str, Any]) -> None:
    """A broken model does not keep others from being tried; standard output is JSON alone."""
    names = [model["model"] for model in report["models"]]
    assert names == sorted(_MODELS.keys() - {"good", "raises"})
    served = [model["model"] for model in report["models"] if "error" not in model]
    assert served == ["gaps [red] ü", "noisy", "other", "typo"]
    assert _model(report, "other") == {"model": "other", "skipped": "python"}
    assert report["environment"] == list(preflight.machine_problems())


@pytest.mark.parametrize(
    ("name", "output", "notes"),
    [("noisy", "y FP32 [4]", []), ("gaps [red] ü", "OUTPUT__0 FP32 [4]", ["leaves out inputs"])],
)
def test_a_model_that_serves_is_described(
    report: dict[str, Any], name: str, output: str, notes: list[str]
) -> None:
    """Also a model that prints, closes streams or forks; a completed config is noted."""
    model = _model(report, name)
    assert model["version"] == "1"
    assert model["artifact"] == "model.py: Python source and weights"
    assert model["inputs"] == ["x FP32 [4] → x"]
    assert model["outputs"] == [output]
    assert (model["max_batch_size"], model["options"], model["warnings"]) == (8, {}, [])
    for note, text in zip(model["notes"], notes, strict=True):
        assert text in note


def test_warnings_and_notes(report: dict[str, Any]) -> None:
    """What a load warns about is a warning; a config that cannot be read has no notes."""
    assert _model(report, "broken_config")["notes"] == []
    (warning,) = _model(report, "typo")["warnings"]
    assert "Did you mean AUTO_COMPLETE_TIMEOUT_S?" in warning


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("misspelt", "Did you mean pytorch_py?"),
        ("no_backend", "config.pbtxt has no `backend`"),
        ("broken_config", "config.pbtxt cannot be read: 2:"),
        ("latin", "config.pbtxt cannot be read"),
        ("broken_source", "model.py fails at line 1: SyntaxError"),
        ("exits", "trying the model ended the process with exit code 7"),
        ("hangs", "trying the model took longer than 1 seconds"),
        ("no_versions", "the model folder has no versions"),
    ],
)
def test_a_broken_model_has_the_server_s_error(
    report: dict[str, Any], name: str, says: str
) -> None:
    """The error is the line that the server would log."""
    error = _model(report, name)["error"]
    assert error.startswith(f"model '{name}': ")
    assert says in error
    assert "\n" not in error


def test_the_line_of_the_user_s_code_is_named(report: dict[str, Any]) -> None:
    """It is the innermost line of the model's own files, and no line of a library."""
    model = _model(report, "raises_in_completion")
    assert "RuntimeError: mat1 and mat2 shapes" in model["error"]
    source = "return torch.relu(x) @ torch.ones(3, 2)"
    assert model["at"].endswith(f"/raises_in_completion/1/helper.py:6 in refuse: {source}")
    assert "traceback" not in model


def test_traceback_is_printed_below_the_error(tmp_path: Path) -> None:
    _lay_out(tmp_path, "raises")
    done = run("check", "--traceback", str(tmp_path))
    assert done.returncode == 1
    error, _, text = done.stdout.partition("Traceback (most recent call last):\n")
    assert "helper.py:6 in refuse" in error
    assert 'model.py", line 8, in forward\n    return refuse(x)\n' in text


def test_each_model_is_printed_when_it_is_done(tmp_path: Path) -> None:
    """The first model's line is printed before the next one is tried; brackets are text."""
    done = tmp_path / "done"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(done)!r}).exists():\n"
    _lay_out(tmp_path, "broken_config", "gaps [red] ü")
    path = tmp_path / "gaps [red] ü" / "1" / "model.py"
    path.write_text(f"{waits}    time.sleep(0.01)\n{path.read_text()}")
    (tmp_path / "gaps [red] ü" / "config.pbtxt").write_text(_COMPLETE)
    command = [sys.executable, "-c", _APP, "check", "--timeout=120", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("FAILED  model 'broken_config': ")
        done.touch()
        assert process.stdout.readline() == "OK      gaps [red] ü 1\n"
        words = [line.split() for line in process.stdout]
    assert ["inputs", "x", "FP32", "[4]", "→", "x"] in words
    assert process.returncode == 1


def test_one_model_by_a_relative_path(tmp_path: Path) -> None:
    """A model folder may be checked itself; nothing in it changes."""
    _lay_out(tmp_path, "good")
    before = tree(tmp_path)
    done = run("check", ".", cwd=tmp_path / "good")
    assert done.stdout.startswith("OK      good 1\n")
    assert done.returncode == int(bool(list(preflight.machine_problems())))
    assert tree(tmp_path) == before


def test_timeout(tmp_path: Path) -> None:
    """--timeout limits the completion of the config, too."""
    _lay_out(tmp_path, "hangs")
    (tmp_path / "hangs" / "config.pbtxt").write_text(_BARE)
    done = run("check", "--json", "--timeout=1", str(tmp_path))
    (model,) = json.loads(done.stdout)["models"]
    assert "trying the model took longer than 1 seconds" in model["error"]


def test_completion_and_load_share_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load has the time that the completion of the config has left."""
    limits: list[float] = []

    def run(_model: str, task: str, _arguments: Any, seconds: float) -> dict[str, Any]:
        limits.append(seconds)
        time.sleep(0.2)
        schema = {"input": [], "output": [], "max_batch_size": 0, "decoupled": False}
        return schema if "schema" in task else {"hooks": False}

    monkeypatch.setattr(child_process, "run", run)
    _lay_out(tmp_path, "gaps [red] ü")
    with pytest.raises(typer.Exit):
        check(tmp_path, as_json=True, timeout=100.0)
    completing, trying = limits
    assert completing == 100.0
    assert 0 < trying < completing


def test_an_empty_folder(tmp_path: Path) -> None:
    """A folder without models is a problem and exit code 1, in words and in JSON."""
    done = run("check", str(tmp_path))
    assert done.returncode == 1
    assert f"{tmp_path} holds no models" in done.stdout
    done = run("check", "--json", str(tmp_path))
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["models"] == []
    assert any("holds no models" in problem for problem in document["environment"])
