"""Models that bring their own Python environment along, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import packed
import pytest
import scenarios
import serving
import tritonclient.grpc
from packed import SITE

from torch_py_backend.config import execution_env
from torch_py_backend.server.client import ModelState

pytestmark = pytest.mark.server

# A package that the server's own environment lacks.
_MODEL = """
import greeting
from torch import Tensor, nn


class Greeting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + greeting.VALUE
"""


@dataclass(frozen=True)
class _Running:
    states: dict[str, ModelState]
    client: tritonclient.grpc.InferenceServerClient


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Running]:
    """A server with the same model in its own environment, and without one."""
    folder = tmp_path_factory.mktemp("environments")
    repository = folder / "repository"
    own = {execution_env.KEY: "$$TRITON_MODEL_DIRECTORY/env"}
    for name, parameters in (("folder", own), ("bare", {})):
        scenarios.Scenario(
            name,
            scenarios.text(_MODEL),
            scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters),
        ).lay_out(repository)
    environment = packed.make(repository / "folder" / "env")
    (environment / SITE / "greeting.py").write_text("VALUE = 42.0\n")
    with serving.running(folder, ready=False) as server:
        states = {one.name: one for one in server.models()}
        with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
            yield _Running(states, client)


def test_model_in_its_own_environment(running: _Running) -> None:
    """A model imports what only its environment has."""
    assert running.states["folder"].ready, running.states["folder"].reason
    x = np.arange(4, dtype=np.float32).reshape(1, 4)
    inputs = serving.infer_inputs(tritonclient.grpc, {"x": x})
    np.testing.assert_array_equal(running.client.infer("folder", inputs).as_numpy("y"), x + 42)


def test_model_without_it(running: _Running) -> None:
    """The server's own Python lacks that package: it was not found by accident."""
    assert not running.states["bare"].ready
    assert "No module named 'greeting'" in running.states["bare"].reason
