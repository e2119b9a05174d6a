"""The facts of compiled files; tests/cli/test_compiled.py exports and imports the files."""

from __future__ import annotations

from pathlib import Path

import build
import pytest

from torch_py_backend.tools import compiled_files

_STEPS = """
import torch


class Net(torch.nn.Module):
    def forward(self, x, start):
        return torch.tanh(x) * (1 - start)
"""


def test_controls_of_sequences(tmp_path: Path, process: None) -> None:
    """The inputs include the controls that the model takes, as in the bundle of a start."""
    build.write(tmp_path, "model.py", _STEPS)
    kind = {"kind": "CONTROL_SEQUENCE_START", "fp32_false_true": [0, 1]}
    control = {"name": "start", "control": [kind]}
    options = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": "{}", "WEIGHTS": "none"}
    arguments = build.arguments(
        sequence_batching={"control_input": [control]},
        parameters={key: {"string_value": value} for key, value in options.items()},
    )
    arguments["model_repository"] = str(tmp_path)
    report = compiled_files.export(arguments, str(tmp_path / "export"))
    assert report["facts"]["inputs"] == "x FP32 [4], start FP32 [1]"
    assert report["missing"].startswith("it was not compiled here")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat\nGCC version:  11.4",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95  Release\n", "580.95"),
        ("", "unknown"),
    ],
)
def test_driver(tmp_path: Path, text: str, version: str) -> None:
    """The driver's version is that of the kernel module; without such a file it is unknown."""
    path = tmp_path / "version"
    path.write_text(text)
    assert compiled_files.driver_version(path) == version
    assert compiled_files.driver_version(tmp_path / "none") == "unknown"
