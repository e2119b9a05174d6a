"""Traces that models of a real server write, while they serve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc_streams
import models
import numpy as np
import pytest
import ranges
import scenarios
import serving
from scenarios import Scenario

from torch_py_backend.server import Server

_SECONDS = 120
# A stream of three responses is six calls of the model's code: wherever a trace begins, it has all.
_BATCHES = 6
_X = np.ones((1, 4), dtype=np.float32)
_YIELDS = """\
class Yields(nn.Module):
    def forward(self, x: Tensor):
        for _ in range(3):
            x = -x
            yield x
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("profiling")
    (made / "traces").mkdir()
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    wished = {"PROFILE_DIR": str(folder / "traces"), "PROFILE_BATCHES": str(_BATCHES)}
    decoupled = "model_transaction_policy { decoupled: true }\n"
    header = models.source()
    for name, writer, more in (
        ("negate", scenarios.python(models.Negate), ""),
        ("yields", scenarios.text(header + _YIELDS), decoupled),
    ):
        text = scenarios.config({"x": [4]}, {"y": [4]}, parameters=wished, more=more)
        Scenario(name, writer, text).lay_out(folder / "repository")
    with serving.running(folder) as made:
        yield made


def _ask(server: Server, name: str) -> None:
    client = grpc_streams.connect(server)
    for one in grpc_streams.responses(client.ask(name, {"x": _X})):
        assert isinstance(one, dict), one
    client.channel.close()


def _trace(server: Server, folder: Path, name: str) -> Path:
    """The model's trace, asked for until it is there."""
    until = time.monotonic() + _SECONDS
    while True:
        _ask(server, name)
        found = sorted((folder / "traces").glob(f"{name}_0_0-*.json.gz"))
        if found:
            return found[0]
        assert time.monotonic() < until, (folder / "server.log").read_text(errors="replace")


@pytest.mark.parametrize("name", ["negate", "yields"])
def test_first_batches_and_again(name: str, server: Server, folder: Path) -> None:
    """A trace of the first batches; another one once a file in the folder is touched."""
    for _ in range(2):
        path = _trace(server, folder, name)
        came = ranges.read(path)
        path.unlink()
        (folder / "traces" / "again").touch()
        assert [one.name for one in came].count("batch") == _BATCHES
        assert any("aten::neg" in one.operators for one in came if one.name == "batch")
        assert any(one.name == "outputs" and "batch" in one.within for one in came)
