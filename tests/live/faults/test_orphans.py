"""A tritonserver that is killed takes its instances along, without `serve`, too."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
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
from tritonclient.utils import InferenceServerException

from torch_py_backend.server import Server

pytestmark = pytest.mark.slow

_BATCHES = scenarios.x_to_y(4).replace("count: 1", "count: 3") + "dynamic_batching {}\n"
_ENDLESS = """
import time


def forward(x):
    while True:
        time.sleep(0.005)
        yield x
"""
_TABLE = (
    Scenario("negative", scenarios.text("def forward(x):\n    return -x\n"), _BATCHES),
    Scenario(
        "endless",
        scenarios.text(_ENDLESS),
        streamed.config({"x": "FP32"}, {"y": "FP32"}).replace("count: 1", "count: 3"),
    ),
)


def _ask_until_it_ends(server: Server) -> int:
    """Send requests until the server does not answer any more; return the number of answers."""
    x = serving.infer_inputs(tritonclient.grpc, {"x": np.ones((1, 4), dtype=np.float32)})
    answers = 0
    with (
        contextlib.suppress(InferenceServerException),
        tritonclient.grpc.InferenceServerClient(server.grpc_address) as client,
    ):
        while client.infer("negative", x, client_timeout=60):
            answers += 1
    return answers


@pytest.mark.parametrize("load", ["idle", "busy"])
def test_a_killed_server(load: str, tmp_path: Path) -> None:
    """Kill -9 of tritonserver: all instances end soon, at rest and while they answer."""
    for scenario in _TABLE:
        scenario.lay_out(tmp_path / "repository")
    with serving.running(tmp_path) as server, ThreadPoolExecutor() as pool:
        instances = psutil.Process(server.process.pid).children(recursive=True)
        assert len(instances) == 6
        answers, streams = [], []
        if load == "busy":
            answers = [pool.submit(_ask_until_it_ends, server) for _ in range(12)]
            client = connect(server)
            streams = [client.ask("endless", {"x": streamed.floats(1)}) for _ in range(12)]
            for stream in streams:
                assert next(iter(responses(stream)))
        server.process.kill()
        server.process.wait()
        assert living.all_end(instances, 60)
        assert all(answer.result() for answer in answers)
