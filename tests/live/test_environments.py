"""Models that bring their own Python environment along, on a real server."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    for name in ("folder", "bare", "foreign"):
        parameters = {} if name == "bare" else {execution_env.KEY: _named(name)}
        scenarios.Scenario(
            name,
            scenarios.text(_MODEL),
            scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters),
        ).lay_out(repository)
    environment = packed.make(repository / "folder" / "env")
    (environment / SITE / "greeting.py").write_text("VALUE = 42.0\n")
    _pack_for_another(repository / "foreign" / "env.tar.gz")
    with serving.running(folder, ready=False) as server:
        states = {one.name: one for one in server.models()}
        with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
            yield _Running(states, client)


def _named(model: str) -> str:
    name = "env" if model == "folder" else "env.tar.gz"
    return f"$$TRITON_MODEL_DIRECTORY/{name}"


def _pack_for_another(output: Path) -> None:
    """Write an environment for a Python that is not: all that a stub looks for has another name."""
    activate = b'export PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd):$PATH"\n'
    with tarfile.open(output, "w:gz") as written:
        entry = tarfile.TarInfo("bin/activate")
        entry.size = len(activate)
        written.addfile(entry, io.BytesIO(activate))
        for name in ("bin/python3", "lib/python3.99/os.py"):
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755
            written.addfile(entry)


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


def test_environment_for_another_python(running: _Running) -> None:
    """It is refused: the stub never sees what is in it."""
    assert not running.states["foreign"].ready
