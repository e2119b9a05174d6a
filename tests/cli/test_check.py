from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
import refused_configs
import scenarios
from command_line import run, tree

from torch_py_backend.config import pbtxt
from torch_py_backend.config.pbtxt import JsonObject

# `cli.check` is the command; other functions are in the module of the same name.
check = importlib.import_module("torch_py_backend.cli.check")

_NEGATE = models.source(models.Negate)
_COMPLETE = scenarios.x_to_y()
_EXAMPLE = "\n\ndef example_inputs():\n    return {'x': torch.rand(2, 4)}\n"
_RAISES = f"""
import torch


class Net(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) @ torch.ones(3, 2)
{_EXAMPLE}"""
_HOOKS = "class Hooks:\n    def postprocess(self, result):\n        return result\n"
_NO_INPUTS = "no inputs are listed"
# By name: the config, the source, and the start of the error.
_MODELS: dict[str, tuple[str, str, str]] = {
    "good": (_COMPLETE, _NEGATE, ""),
    "gaps [red] ü": (scenarios.BARE, _NEGATE + _EXAMPLE, ""),
    "other": ('backend: "python"\n', _NEGATE, ""),
    "misspelt": (
        _COMPLETE.replace("pytorch_py", "PyTorch-py"),
        _NEGATE,
        "config.pbtxt names the backend 'PyTorch-py'",
    ),
    "nothing": ("", _NEGATE, "config.pbtxt names the backend ''; expected the line backend:"),
    "unreadable": (
        'backend: "pytorch_py"\ninput [{ name: }]\n',
        _NEGATE,
        "config.pbtxt cannot be read: 2:",
    ),
    "broken": (_COMPLETE, "def broken(:\n", "model.py fails at SyntaxError: invalid syntax (model"),
    "raises": (
        _COMPLETE,
        _RAISES,
        "the warm-up with x [8, 4] failed: forward() raised RuntimeError: ",
    ),
    "backend": ('backend: "pytorch"', _NEGATE, _NO_INPUTS),
    "libtorch": ('platform: "pytorch_libtorch"', _NEGATE, _NO_INPUTS),
    "aoti": ('platform: "torch_aoti"', _NEGATE, _NO_INPUTS),
    # as Triton: tests/live compares
    **{name: (text, _NEGATE, says) for name, (text, says) in refused_configs.TABLE.items()},
}


def _lay_out(repository: Path, *names: str) -> Path:
    for name in names:
        config, source, _ = _MODELS[name]
        scenarios.Scenario(name, scenarios.text(source), config).lay_out(repository)
    return repository


def test_a_repository(here: None, tmp_path: Path) -> None:
    repository = _lay_out(tmp_path / "repository", *_MODELS)
    (repository / "notes.txt").write_text("no model")
    (repository / "broken link").symlink_to("/no/such/model")
    done = run("check", "--json", "repository", cwd=tmp_path)
    assert done.returncode == 1, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["environment"] == list(check.machine_problems())
    reports = {model["model"]: model for model in report["models"]}
    assert list(reports) == sorted(_MODELS)
    served = [name for name, model in reports.items() if "error" not in model]
    assert served == ["gaps [red] ü", "good", "other"]
    assert reports["other"] == {"model": "other", "skipped": "python"}
    for name, output in (("good", "y FP32 [4]"), ("gaps [red] ü", "OUTPUT__0 FP32 [4]")):
        described = {
            "version": "1",
            "artifact": "model.py: Python source and weights",
            "inputs": ["x FP32 [4] → x"],
            "outputs": [output],
            "max_batch_size": 8,
            "options": {},
            "warnings": [],
        }
        assert reports[name].items() >= described.items()
    for name in _MODELS.keys() - served:
        error = reports[name]["error"]
        assert error.startswith(f"model '{name}': {_MODELS[name][2]}")
        assert "\n" not in error
        assert "traceback" not in reports[name]


def test_printed_lines(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "machine_problems", lambda: ["It is too small."])
    repository = _lay_out(tmp_path, "raises", "gaps [red] ü", "other", "good")
    folder = repository / "gaps [red] ü"
    (folder / "1" / "hooks.py").write_text(_HOOKS)
    with (folder / "config.pbtxt").open("a") as config:
        config.write(pbtxt.lines("parameters", pbtxt.parameters({"NUM_THREADS": "1"}))[0])
    read = pbtxt.read

    def read_others(folder: Path) -> JsonObject:
        if folder.name == "good":
            raise PermissionError(13, "Permission denied")
        return read(folder)

    monkeypatch.setattr(pbtxt, "read", read_others)
    done = run("check", "--traceback", str(repository))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "PROBLEM It is too small."
    assert lines[1] == "OK      gaps [red] ü 1"
    assert "\nFAILED  model 'good': [Errno 13] Permission denied" in done.stdout
    for line in ("inputs x FP32 [4] → x", "hooks postprocess", "options NUM_THREADS 1"):
        assert line.split() in [printed.split() for printed in lines]
    assert lines[-1] == "1 OK, 2 FAILED, 1 SKIPPED, 1 PROBLEM"
    assert "SKIPPED other: served by python" in lines
    _, _, text = done.stdout.partition("\nFAILED  model 'raises': ")
    _, _, text = text.partition("Traceback (most recent call last):\n")
    assert 'model.py", line 7, in forward\n    return torch.relu(x) @' in text


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
