"""A tritonserver that is killed takes its instances along, without `serve`, too."""

from __future__ import annotations

from pathlib import Path

import living
import numpy as np
import psutil
import pytest
import scenarios
import serving
import streamed
import tritonclient.grpc
from grpc_streams import connect, responses
from scenarios import Scenario

from torch_py_backend.processes import instance_status
from torch_py_backend.processes.instance_status import InstanceState
from torch_py_backend.server import Server

pytestmark = pytest.mark.slow

_COUNT = 2
_HANGS = """
import time


def forward(x):
    time.sleep(1000)
    return x
"""
_ENDLESS = """
import time


def forward(x):
    while True:
        time.sleep(0.005)
        yield x
"""
_TABLE = (
    Scenario("hangs", scenarios.text(_HANGS), scenarios.x_to_y(4, WARMUP="false")),
    Scenario("endless", scenarios.text(_ENDLESS), streamed.config({"x": "FP32"}, {"y": "FP32"})),
    Scenario("idle", scenarios.text(_HANGS), scenarios.x_to_y(4, WARMUP="false")),
)


def _work(server: Server) -> None:
    """Let each instance of two models answer a request."""
    client = tritonclient.grpc.InferenceServerClient(server.grpc_address)
    x = np.ones((1, 4), dtype=np.float32)
    for _ in range(_COUNT):
        client.async_infer("hangs", serving.infer_inputs(tritonclient.grpc, {"x": x}), lambda *_: 0)
    streams = [connect(server).ask("endless", {"x": streamed.floats(1)}) for _ in range(_COUNT)]
    for stream in streams:
        assert next(iter(responses(stream)))
    readers = [instance_status.Reader(path) for path in instance_status.files(server.status_folder)]
    hanging = [reader for reader in readers if reader.identity.model == "hangs"]
    serving.until(lambda: all(one.read().state is InstanceState.BUSY for one in hanging))


def test_a_killed_server(tmp_path: Path) -> None:
    """Kill -9 of tritonserver: all instances end soon, at rest and while they answer."""
    for scenario in _TABLE:
        folder = scenario.lay_out(tmp_path / "repository")
        config = scenario.config.replace("count: 1", f"count: {_COUNT}")
        (folder / "config.pbtxt").write_text(config)
    with serving.running(tmp_path) as server:
        instances = psutil.Process(server.process.pid).children(recursive=True)
        assert len(instances) == _COUNT * len(_TABLE)
        _work(server)
        # Not reaped, as in a container without an init process: Triton's stub notices nothing.
        server.process.kill()
        assert living.all_end(instances)
