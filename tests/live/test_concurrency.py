"""Many clients at once: rows go back to their owners, and instances work at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import models
import numpy as np
import pytest
import safetensors.torch
import scenarios
import serving
import tritonclient.grpc
import tritonclient.http

from torch_py_backend.server import Server

_CLIENTS = 16
_REQUESTS = 20


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_rows_return_to_their_owner(protocol: str, server: Server) -> None:
    """16 clients send batches of 1 to 8 rows to two instances; each gets its own rows back."""
    with ThreadPoolExecutor(_CLIENTS) as pool:
        rows = sum(pool.map(lambda number: _client(server, protocol, number), range(_CLIENTS)))
    assert rows > _CLIENTS * _REQUESTS
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        # Triton counts a batch after it has answered it.
        serving.until(lambda: _statistics(client, "batched").inference_count >= rows)
        statistics = _statistics(client, "batched")
    assert statistics.execution_count < statistics.inference_count, "no batch was ever formed"


def _statistics(client: tritonclient.grpc.InferenceServerClient, model: str) -> Any:
    (statistics,) = client.get_inference_statistics(model).model_stats
    return statistics


def _client(server: Server, protocol: str, number: int) -> int:
    module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    address = {"http": server.http_address, "grpc": server.grpc_address}[protocol]
    client = module.InferenceServerClient(address)
    random = np.random.default_rng(number)
    total = 0
    for _ in range(_REQUESTS):
        x = random.standard_normal((int(random.integers(1, 9)), 4)).astype(np.float32)
        y = client.infer("batched", serving.infer_inputs(module, {"x": x})).as_numpy("y")
        np.testing.assert_allclose(y, scenarios.eager(_MODULE, x=x), rtol=1e-4, atol=1e-5)
        total += len(x)
    client.close()
    return total


_MODULE = scenarios.affine()


# --- two instances of a model with hooks ---------------------------------------------------------

_COMPUTED, _PREPARED = 2.0, 3.0  # requests; the warm-up's values are others
_MARKS = f"""
import os
import time
from pathlib import Path

from torch import Tensor, nn

FOLDER = Path(__file__).parent


def is_there(mark: str) -> float:
    until = time.monotonic() + 30
    while not (FOLDER / mark).exists() and time.monotonic() < until:
        time.sleep(0.01)
    return float((FOLDER / mark).exists())


class Net(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = x.clone()
        if x[0, 0] == {_COMPUTED}:
            (FOLDER / "computing").touch()
            seen[:] = is_there("prepared")
        return {{"seen": seen, "process": x.new_full(x.shape, os.getpid())}}


class Hooks:
    def preprocess(self, x: Tensor) -> Tensor:
        if x[0] == {_PREPARED} and is_there("computing"):
            (FOLDER / "prepared").touch()
        return x
"""
_OVERLAPPING = scenarios.Scenario(
    "overlapping",
    scenarios.hooked(_MARKS),
    scenarios.config(
        {"x": [1]},
        {"seen": [1], "process": [1]},
        more="instance_group [{ kind: KIND_CPU count: 2 }]\n",
        parameters={"WEIGHTS": "none"},
    ),
)


def test_hooks_of_one_batch_overlap_with_forward_of_another(server: Server) -> None:
    """While one instance computes, another prepares the next batch: forward() waits to see it."""
    with (
        tritonclient.grpc.InferenceServerClient(server.grpc_address) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        computed, prepared = pool.map(lambda value: _sent(client, value), (_COMPUTED, _PREPARED))
    assert computed["seen"] == 1
    assert prepared["seen"] == _PREPARED
    assert computed["process"] != prepared["process"]


def _sent(client: tritonclient.grpc.InferenceServerClient, value: float) -> dict[str, float]:
    inputs = serving.infer_inputs(tritonclient.grpc, {"x": np.array([[value]], dtype=np.float32)})
    answer = client.infer("overlapping", inputs, client_timeout=120)
    return {name: float(answer.as_numpy(name)[0, 0]) for name in ("seen", "process")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("concurrency")
    version = folder / "repository" / "batched" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(models.source(models.Affine))
    safetensors.torch.save_file(_MODULE.state_dict(), version / "model.safetensors")
    (version.parent / "config.pbtxt").write_text(
        scenarios.config(
            {"x": [4]},
            {"y": [3]},
            max_batch_size=32,
            more="dynamic_batching { max_queue_delay_microseconds: 500 }\n"
            "instance_group [{ kind: KIND_CPU count: 2 }]\n",
        )
    )
    _OVERLAPPING.lay_out(folder / "repository")
    with serving.running(folder) as server:
        yield server
