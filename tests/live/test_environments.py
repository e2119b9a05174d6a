"""Models that bring their own Python environment along, on a real server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import packed
import pytest
import scenarios
import serving
from packed import SITE

from torch_py_backend.config import execution_env

pytestmark = pytest.mark.server

# A package that the server's own environment lacks.
_MODEL = """
import greeting
from torch import Tensor, nn


class Greeting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + greeting.VALUE
"""


def test_model_in_its_own_environment(tmp_path: Path) -> None:
    """A model imports what only its environment has."""
    repository = tmp_path / "repository"
    parameters = {execution_env.KEY: "$$TRITON_MODEL_DIRECTORY/env"}
    config = scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters)
    scenarios.Scenario("net", scenarios.text(_MODEL), config).lay_out(repository)
    environment = packed.make(repository / "net" / "env")
    (environment / SITE / "greeting.py").write_text("VALUE = 42.0\n")
    x = np.arange(4, dtype=np.float32).reshape(1, 4)
    with serving.asked(tmp_path) as running:
        assert running.states["net"].ready, running.states["net"].reason
        running.check("grpc", "net", scenarios.Call({"x": x}, {"y": x + 42}))
