"""Requests of different lengths in one batch, on a real server."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import scenarios
import tritonclient.grpc

from torch_py_backend.server import Server

_REQUESTS = 64


@pytest.mark.parametrize("side", ["right", "left"])
def test_lengths_share_a_batch_and_come_back(tmp_path: Path, side: str) -> None:
    """Each request gets its own tokens back, of its own length, out of batches of many lengths."""
    scenarios.Scenario(
        "padded",
        scenarios.python(models.Tokens),
        scenarios.tokens(
            f'{{"ids": {{"value": 7, "side": "{side}", "mask": "mask"}}}}',
            "dynamic_batching { max_queue_delay_microseconds: 20000 }\n",
        ),
    ).lay_out(tmp_path / "repository")
    with (
        (tmp_path / "server.log").open("wb") as log,
        Server(
            tmp_path / "repository", http_port=0, grpc_port=0, metrics_port=0, log=log
        ) as server,
    ):
        (state,) = server.wait_loaded(timeout=120)
        assert state.ready, state.reason
        client = tritonclient.grpc.InferenceServerClient(server.grpc_address)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda number: _ask(client, number), range(_REQUESTS)))
        # Triton counts a batch after it has answered it, and is told ours once a second.
        _until(lambda: _statistics(client).inference_count == _REQUESTS)
        _until(lambda: all(_told(server)))
        # One length a batch would need about as many executions as requests.
        assert _statistics(client).execution_count < _REQUESTS / 2
        client.close()


def _until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _statistics(client: tritonclient.grpc.InferenceServerClient) -> Any:
    (statistics,) = client.get_inference_statistics("padded").model_stats
    return statistics


def _told(server: Server) -> list[float]:
    """Rows, values and padded values, by Triton's metrics."""
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as answer:
        metrics = answer.read().decode()
    labels = '{model="padded",version="1"}'
    found = (
        re.search(rf"pytorch_py_{name}_total{re.escape(labels)} (\S+)", metrics)
        for name in ("rows", "values", "padded_values")
    )
    return [float(one[1]) if one else 0.0 for one in found]


def _ask(client: tritonclient.grpc.InferenceServerClient, number: int) -> None:
    length = 1 + number % 13
    ids = np.arange(number, number + length).reshape(1, length)
    tensor = tritonclient.grpc.InferInput("ids", [1, length], "INT64")
    tensor.set_data_from_numpy(ids)
    answer = client.infer("padded", [tensor])
    places = np.arange(1, length + 1)
    np.testing.assert_array_equal(answer.as_numpy("y"), ids * 100 + places)
    assert answer.as_numpy("count").tolist() == [[length]]
