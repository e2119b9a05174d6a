"""One point of a sweep: what runs in which order, and when it is an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tools import test_load_generator

from torch_py_backend.errors import BenchError, ServerError
from torch_py_backend.tools import sweep
from torch_py_backend.tools.load_generator import Closed, Load, Open, Send
from torch_py_backend.tools.sweep import Point


class _Counting:
    """A server that counts its requests, as Triton's statistics do."""

    def __init__(self, *, fails: bool = False, late: int = 1) -> None:
        self.requests = 0
        self.looks: list[int] = []
        self._fails = fails
        # Triton counts a request a little after it has answered it.
        self._counted = [0] * late

    async def statistics(self, model: str) -> dict[str, Any]:
        self._counted.append(self.requests)
        counted = self._counted.pop(0)
        self.looks.append(counted)
        count = {"count": counted, "ns": counted * 1000}
        return {"model_stats": [{"name": model, "inference_stats": {"success": count}}]}

    async def send(self) -> None:
        self.requests += 1
        await asyncio.sleep(0.001)
        if self._fails:
            raise ServerError("no.")


def _point(
    server: _Counting, shape: Load, *, warmup: float = 0.02, send: Send | None = None, **more: Any
) -> Point | None:
    client: Any = server
    return test_load_generator.play(
        sweep.point(client, "m", send or server.send, shape, seconds=0.05, warmup=warmup, **more)
    )


@pytest.mark.parametrize("shape", [Closed(2), Open(400)], ids=["closed", "open"])
@pytest.mark.parametrize("warmup", [0.0, 0.05])
@pytest.mark.parametrize("late", [1, 4])
def test_statistics_are_of_the_measured_requests(shape: Load, warmup: float, late: int) -> None:
    """Triton counts as many requests as were measured; the warm-up is not among them."""
    server = _Counting(late=late)
    found = _point(server, shape, warmup=warmup)
    assert found is not None
    assert found.load == shape
    assert found.server.requests == len(found.result.latencies) > 0
    assert (found.server.requests < server.requests) == (warmup > 0)
    assert server.looks[-2:] == [server.requests] * 2


@pytest.mark.parametrize("warmup", [0.0, 0.02])
def test_all_requests_fail(warmup: float) -> None:
    """A load without one answer is an error with the first failure."""
    with pytest.raises(BenchError, match=r"concurrency 1: all \d+ requests failed; the first: no."):
        _point(_Counting(fails=True), Closed(1), warmup=warmup)


def test_some_requests_fail() -> None:
    """A load with one answer is a measurement."""
    server = _Counting()

    async def send() -> None:
        await server.send()
        if server.requests % 2:
            raise ServerError("odd.")

    found = _point(server, Closed(1), warmup=0, send=send)
    assert found is not None
    assert found.result.errors > 0


def test_stopped_in_the_warm_up() -> None:
    """Nothing was measured, so there is no point."""

    async def stopped() -> Point | None:
        stop = asyncio.Event()
        stop.set()
        server: Any = _Counting()
        return await sweep.point(
            server, "m", server.send, Closed(1), seconds=1, warmup=1, stop=stop
        )

    assert asyncio.run(stopped()) is None


def test_loads_in_words() -> None:
    """As messages and the progress bar name them."""
    assert [sweep.title(load) for load in (Closed(8), Open(0.5))] == ["concurrency 8", "rate 0.5"]
