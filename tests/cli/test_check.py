"""`check`: models tried without a server."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import command_line
import models
import pytest
import refused_configs
import scenarios
import typer
from command_line import run, tree

from torch_py_backend.processes import child_process

# `cli.check` is the command; other functions are in the module of the same name.
check = importlib.import_module("torch_py_backend.cli.check")

_NEGATE = models.source(models.Negate)
_COMPLETE = scenarios.x_to_y()
_BARE = 'backend: "pytorch_py"\n'
_EXAMPLE = "\n\ndef example_inputs():\n    return {'x': torch.rand(2, 4)}\n"
_GAPS = _NEGATE + _EXAMPLE
_RAISES = f"""
import torch


class Net(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) @ torch.ones(3, 2)
{_EXAMPLE}"""
_MODELS: dict[str, tuple[str, str]] = {
    "good": (_COMPLETE, _NEGATE),
    "gaps [red] ü": (_BARE, _GAPS),
    "misspelt": (_COMPLETE.replace("pytorch_py", "pytorch-py"), _NEGATE),
    "other": ('backend: "python"\n', _NEGATE),
    "broken_config": ('backend: "pytorch_py"\ninput [{ name: }]\n', _NEGATE),
    "broken_source": (_COMPLETE, "def broken(:\n"),
    "raises": (_COMPLETE, _RAISES),
    "raises_in_completion": (_BARE, _RAISES),
}


def _lay_out(repository: Path, *names: str) -> Path:
    for name in names:
        config, source = _MODELS[name]
        scenarios.Scenario(name, scenarios.text(source), config).lay_out(repository)
    return repository


@pytest.fixture
def here(process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "run", command_line.here)


def test_a_repository(here: None, tmp_path: Path) -> None:
    models = _MODELS.keys() - {"raises"}
    repository = _lay_out(tmp_path / "repository", *models)
    (repository / "notes.txt").write_text("no model")
    (repository / "broken link").symlink_to("/no/such/model")
    done = run("check", "--json", "repository", cwd=tmp_path)
    assert done.returncode == 1, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["environment"] == list(check.machine_problems())
    reports = {model["model"]: model for model in report["models"]}
    assert list(reports) == sorted(models)
    served = [name for name, model in reports.items() if "error" not in model]
    assert served == ["gaps [red] ü", "good", "other"]
    assert reports["other"] == {"model": "other", "skipped": "python"}
    for name, output in (("good", "y FP32 [4]"), ("gaps [red] ü", "OUTPUT__0 FP32 [4]")):
        assert (
            reports[name].items()
            >= {
                "version": "1",
                "artifact": "model.py: Python source and weights",
                "inputs": ["x FP32 [4] → x"],
                "outputs": [output],
                "max_batch_size": 8,
                "options": {},
                "warnings": [],
            }.items()
        )
    for name, says in {
        "misspelt": "names the backend 'pytorch-py'",
        "broken_config": "config.pbtxt cannot be read: 2:",
        "broken_source": "model.py fails at SyntaxError: invalid syntax (model.py, line 1)",
        "raises_in_completion": "RuntimeError: mat1 and mat2 shapes",
    }.items():
        error = reports[name]["error"]
        assert error.startswith(f"model '{name}': ")
        assert says in error
        assert "\n" not in error
        assert "traceback" not in reports[name]


@pytest.mark.parametrize("name", refused_configs.TABLE)
def test_config_that_triton_refuses(name: str, here: None, tmp_path: Path) -> None:
    """tests/live compares."""
    text, says = refused_configs.TABLE[name]
    refused_configs.write(tmp_path, name, text)
    (model,) = json.loads(run("check", "--json", str(tmp_path / name)).stdout)["models"]
    assert model["error"].startswith(f"model '{name}': {says}")


def test_traceback_is_printed_below_the_error(here: None, tmp_path: Path) -> None:
    _lay_out(tmp_path, "raises")
    done = run("check", "--traceback", str(tmp_path))
    assert done.returncode == 1
    _, _, text = done.stdout.partition("Traceback (most recent call last):\n")
    assert 'model.py", line 7, in forward\n    return torch.relu(x) @' in text


def test_printed_lines(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "machine_problems", lambda: ["It is too small."])
    _lay_out(tmp_path, "broken_config", "gaps [red] ü", "other")
    with pytest.raises(typer.Exit) as end:
        check.check(tmp_path, timeout=120.0)
    assert end.value.exit_code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "PROBLEM It is too small."
    assert lines[1].startswith("FAILED  model 'broken_config': ")
    assert "OK      gaps [red] ü 1" in lines
    assert ["inputs", "x", "FP32", "[4]", "→", "x"] in [line.split() for line in lines]
    assert lines[-2:] == [
        "SKIPPED other: served by python",
        "1 OK, 1 FAILED, 1 SKIPPED, 1 PROBLEM",
    ]


def test_one_model_by_a_relative_path(here: None, tmp_path: Path) -> None:
    """In the version that is served; it does not change."""
    _lay_out(tmp_path, "good")
    (tmp_path / "good" / "2").mkdir()
    with (tmp_path / "good" / "config.pbtxt").open("a") as config:
        config.write("version_policy { specific { versions: 1 } }\n")
    before = tree(tmp_path)
    done = run("check", ".", cwd=tmp_path / "good")
    assert done.stdout.startswith("OK      good 1\n")
    assert done.returncode == int(bool(list(check.machine_problems())))
    assert tree(tmp_path) == before


def test_an_empty_folder(tmp_path: Path) -> None:
    for flags in ((), ("--json",)):
        done = run("check", str(tmp_path), *flags)
        assert (done.returncode, f"{tmp_path} holds no models" in done.stdout) == (1, True)


def test_machine_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    size = SimpleNamespace(total=256 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: size)
    assert list(check.machine_problems()) == []
    size.total -= 1
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    triton, memory = check.machine_problems()
    assert triton.startswith("no tritonserver was found")
    assert memory.startswith("the shared memory has 255 MB")


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ('backend: "pytorch"', "FAILED  model 'net': the model folder has no version"),
        ('platform: "pytorch_libtorch"', "FAILED  model 'net': the model folder has no version"),
        ('platform: "torch_aoti"', "FAILED  model 'net': the model folder has no version"),
        ('platform: "ensemble"', "SKIPPED net: served by ensemble"),
        ('backend: "PyTorch-Py"', "FAILED  model 'net': config.pbtxt names the backend 'PyTorch-"),
        ("", "FAILED  model 'net': config.pbtxt names the backend ''; expected the line backend:"),
    ],
)
def test_backend(text: str, starts: str, tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "config.pbtxt").write_text(text)
    assert starts in run("check", str(tmp_path / "net")).stdout
