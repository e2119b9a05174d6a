"""Which compiled files a start uses; tests/cli/test_compiled.py exports and imports them."""

from __future__ import annotations

from pathlib import Path

import build

from torch_py_backend.config import model_config
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
    bundle, package = compiled_files.used(model_config.parse(arguments))
    assert bundle is not None
    assert bundle.facts["inputs"] == ["x FP32 [4]", "start FP32 [1]"]
    assert package is None
    report = compiled_files.export(arguments, str(tmp_path / "export"))
    assert report["missing"].startswith("it was not compiled here")
