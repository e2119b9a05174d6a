"""Traces that models of a real server write, while they serve."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc_streams
import models
import numpy as np
import pytest
import scenarios
import serving
from scenarios import Scenario

from torch_py_backend.observability.profiling import BATCHES
from torch_py_backend.server import Server

_SECONDS = 120
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
    wished = {"PROFILE_DIR": str(folder / "traces")}
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


def _trace(server: Server, folder: Path, name: str) -> list[str]:
    """Send requests until the trace is there; return the names of its events."""
    until = time.monotonic() + _SECONDS
    while True:
        _ask(server, name)
        for path in (folder / "traces").glob(f"{name}_0_0-*.json.gz"):
            # While the profiler still writes the file, it is not complete.
            with contextlib.suppress(EOFError), gzip.open(path) as file:
                return [event["name"] for event in json.load(file)["traceEvents"]]
        assert time.monotonic() < until, (folder / "server.log").read_text(errors="replace")


@pytest.mark.parametrize("name", ["negate", "yields"])
def test_first_batches(name: str, server: Server, folder: Path) -> None:
    """Each instance writes a trace of its first batches."""
    names = _trace(server, folder, name)
    assert names.count("batch") == BATCHES
    assert "aten::neg" in names
