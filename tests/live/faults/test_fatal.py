"""Poisoned instances, and requests whose clients have left, on a real server."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenarios
import serving
import torch
import tritonclient.grpc
from grpc_streams import metric
from tritonclient.grpc import InferenceServerException

from torch_py_backend.processes import instance_status
from torch_py_backend.processes.instance_status import InstanceState
from torch_py_backend.server import Server


class Breaks(torch.nn.Module):
    """Raises what torch raises once a device is spoilt, from a value of -1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.broken |= bool((x == -1).any())
        if self.broken:
            from torch_py_backend.pipeline import failures

            def probe(device: torch.device) -> None:
                raise RuntimeError("CUDA error: device-side assert triggered")

            failures.probe = probe
            probe(x.device)
        return x * 2


class Counts(torch.nn.Module):
    """Takes as many seconds as its values say; the answer is the count of rows that took time."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        if bool((x > 0).any()):
            self.rows += x.shape[0]
            time.sleep(float(x.max()))
        return torch.full_like(x, self.rows)


_TABLE = (
    scenarios.Scenario("stays", scenarios.python(Breaks), scenarios.x_to_y(4)),
    scenarios.Scenario("counts", scenarios.python(Counts), scenarios.x_to_y(4, WARMUP="false")),
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Any, Path]]:
    folder = tmp_path_factory.mktemp("faults")
    for scenario in _TABLE:
        scenario.lay_out(folder / "repository")
    with serving.running(folder) as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_address)
        yield server, client, folder / "server.log"
        client.close()


def _inputs(value: float) -> list[Any]:
    x = np.full((1, 4), value, dtype=np.float32)
    return serving.infer_inputs(tritonclient.grpc, {"x": x})


def _ask(client: Any, model: str, value: float) -> Any:
    return client.infer(model, _inputs(value)).as_numpy("y")


def _refused(client: Any, model: str, value: float) -> str:
    with pytest.raises(InferenceServerException) as refusal:
        _ask(client, model, value)
    assert "UNAVAILABLE" in refusal.value.status()
    return str(refusal.value.message())


def test_an_instance_that_stays(running: tuple[Server, Any, Path]) -> None:
    """It refuses all requests at once with the reason; other models are answered."""
    server, client, log = running
    assert metric(server, "pytorch_py_poisoned", "stays") == 0
    assert (_ask(client, "stays", 3) == 6).all()

    for value in (-1, 3, 4):
        message = _refused(client, "stays", value)
        assert "met a fatal error" in message
        assert "device-side assert triggered" in message
        assert "/" not in message

    serving.until(lambda: metric(server, "pytorch_py_poisoned", "stays") == 1)  # once a second
    assert metric(server, "pytorch_py_poisoned", "counts") == 0
    assert (_ask(client, "counts", 0) == 0).all()
    text = log.read_text(errors="replace")
    assert text.count("instance stays_0_0 is poisoned and refuses all requests") == 1
    assert "Traceback (most recent call last)" in text


def test_cancelled_and_late_requests(running: tuple[Server, Any, Path]) -> None:
    """Requests that are cancelled, or past their client's deadline, are not run."""
    server, client, _ = running
    _ask(client, "counts", 0.1)  # from now on the instance knows that it pays to ask
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(seconds: float, **more: Any) -> Any:
        return client.async_infer(
            "counts", _inputs(seconds), lambda result, error: answers.put((result, error)), **more
        )

    send(5)
    serving.until(lambda: _is_busy(server, "counts"))
    calls = [send(0.1) for _ in range(3)]
    send(0.1, client_timeout=0.2)
    time.sleep(0.3)  # until it is past
    for call in calls:
        call.cancel()
    errors = [answers.get(timeout=120)[1] for _ in range(5)]

    assert errors.count(None) == 1
    # The one before, this one, and the next.
    assert (_ask(client, "counts", 0.1) == 3).all()


def _is_busy(server: Server, model: str) -> bool:
    readers = map(instance_status.Reader, instance_status.files(server.status_folder))
    return any(
        reader.identity.model == model and reader.read().state is InstanceState.BUSY
        for reader in readers
    )
