"""Requests of different lengths in one batch, on a real server."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import models
import numpy as np
import pytest
import scenarios
import serving
import tritonclient.grpc

from torch_py_backend.server import Server

_REQUESTS = 64
_SIDES = ("right", "left")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model for each side; its name is the side's."""
    folder = tmp_path_factory.mktemp("padding")
    for side in _SIDES:
        scenarios.Scenario(
            side,
            scenarios.python(models.Tokens),
            scenarios.tokens(
                f'{{"ids": {{"value": 7, "side": "{side}", "mask": "mask"}}}}',
                "dynamic_batching { max_queue_delay_microseconds: 500000 }\n",
            ),
        ).lay_out(folder / "repository")
    with serving.running(folder) as made:
        yield made


@pytest.mark.parametrize("side", _SIDES)
def test_lengths_share_a_batch_and_come_back(side: str, server: Server) -> None:
    """Each request gets its own tokens back, of its own length, out of batches of many lengths."""
    client = tritonclient.grpc.InferenceServerClient(server.grpc_address)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: _ask(client, side, number), range(_REQUESTS)))
    # Triton counts a batch after it has answered it, and is told ours once a second.
    _until(lambda: _statistics(client, side).inference_count == _REQUESTS)
    _until(lambda: all(_told(server, side)))
    # One length a batch would need about as many executions as requests.
    assert _statistics(client, side).execution_count < _REQUESTS / 2
    client.close()


def _until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _statistics(client: tritonclient.grpc.InferenceServerClient, model: str) -> Any:
    (statistics,) = client.get_inference_statistics(model).model_stats
    return statistics


def _told(server: Server, model: str) -> list[float]:
    """Rows, values and padded values, by Triton's metrics."""
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as answer:
        metrics = answer.read().decode()
    labels = f'{{model="{model}",version="1"}}'
    found = (
        re.search(rf"pytorch_py_{name}_total{re.escape(labels)} (\S+)", metrics)
        for name in ("rows", "values", "padded_values")
    )
    return [float(one[1]) if one else 0.0 for one in found]


def _ask(client: tritonclient.grpc.InferenceServerClient, model: str, number: int) -> None:
    length = 1 + number % 13
    ids = np.arange(number, number + length).reshape(1, length)
    tensor = tritonclient.grpc.InferInput("ids", [1, length], "INT64")
    tensor.set_data_from_numpy(ids)
    answer = client.infer(model, [tensor])
    places = np.arange(1, length + 1)
    np.testing.assert_array_equal(answer.as_numpy("y"), ids * 100 + places)
    assert answer.as_numpy("count").tolist() == [[length]]
