"""Many clients at once: every row goes back to its owner."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

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
_REQUESTS = 60


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_rows_return_to_their_owner(protocol: str, server: Server) -> None:
    """16 clients send batches of 1 to 8 rows to two instances; each gets its own rows back."""
    with ThreadPoolExecutor(_CLIENTS) as pool:
        rows = sum(pool.map(lambda number: _client(server, protocol, number), range(_CLIENTS)))
    assert rows > _CLIENTS * _REQUESTS
    client = tritonclient.grpc.InferenceServerClient(server.grpc_address)
    deadline = time.monotonic() + 60
    (statistics,) = client.get_inference_statistics("batched").model_stats
    # Triton counts a batch after it has answered it.
    while statistics.inference_count < rows:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        (statistics,) = client.get_inference_statistics("batched").model_stats
    assert statistics.execution_count < statistics.inference_count, "no batch was ever formed"
    client.close()


def _client(server: Server, protocol: str, number: int) -> int:
    module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    address = {"http": server.http_address, "grpc": server.grpc_address}[protocol]
    client = module.InferenceServerClient(address)
    random = np.random.default_rng(number)
    total = 0
    for _ in range(_REQUESTS):
        x = random.standard_normal((int(random.integers(1, 9)), 4)).astype(np.float32)
        tensor = module.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        y = client.infer("batched", [tensor]).as_numpy("y")
        np.testing.assert_allclose(y, scenarios.eager(_MODULE, x=x), rtol=1e-4, atol=1e-5)
        total += len(x)
    client.close()
    return total


_MODULE = scenarios.affine()


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
    with serving.running(folder) as server:
        yield server
