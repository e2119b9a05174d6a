"""Instances beyond help, and requests that nobody waits for, on a real server."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


class Hungry(torch.nn.Module):
    """Needs 400 MB for each row, in a process that may take no more than 1.5 GB beside what it has.

    A row above 100 needs more than there is.
    """

    def __init__(self) -> None:
        super().__init__()
        import resource
        from pathlib import Path

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 1_500_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copies = 10_000_000_000 if bool((x > 100).any()) else 25_000_000
        return x * 2 + x.repeat(1, copies)[:, :4] * 0


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
    scenarios.Scenario(
        "hungry",
        scenarios.python(Hungry),
        scenarios.x_to_y(4, WARMUP="false")
        + "dynamic_batching { max_queue_delay_microseconds: 500000 }\n",
    ),
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

    assert metric(server, "pytorch_py_poisoned", "stays") == 1
    assert metric(server, "pytorch_py_poisoned", "counts") == 0
    assert (_ask(client, "counts", 0) == 0).all()
    text = log.read_text(errors="replace")
    assert text.count("instance stays_0_0 is poisoned and refuses all requests") == 1
    assert "Traceback (most recent call last)" in text


def test_a_process_that_may_take_no_more_memory(running: tuple[Server, Any, Path]) -> None:
    """Its batches are run in smaller calls; only a request that never fits is refused with 503."""
    _, client, _ = running
    sent = [1.0, 2.0, 3.0, 400.0, 5.0, 6.0, 7.0, 8.0]
    with ThreadPoolExecutor(len(sent)) as pool:
        calls = [pool.submit(_ask, client, "hungry", value) for value in sent]
    for value, call in zip(sent, calls, strict=True):
        if value < 100:
            assert (call.result() == 2 * value).all()
        else:
            refusal = call.exception()
            assert isinstance(refusal, InferenceServerException)
            assert "UNAVAILABLE" in refusal.status()
            assert "does not fit in memory" in refusal.message()


def test_requests_that_nobody_waits_for(running: tuple[Server, Any, Path]) -> None:
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
