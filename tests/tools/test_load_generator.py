"""Loads on a simulated clock, and Triton's statistics of them."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from torch_py_backend.errors import ServerError, ToolError
from torch_py_backend.tools import load_generator
from torch_py_backend.tools.load_generator import STAGES, Point, Result, Send, ServerWork

_T = TypeVar("_T")


class _SimulatedClock(selectors.SelectSelector):
    """A selector that advances the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


def _play(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on the simulated clock."""
    selector = _SimulatedClock()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def _run(send: Send, concurrency: int) -> Result:
    return _play(load_generator.run(send, concurrency, 1.0))


def _takes(seconds: float) -> Send:
    async def send() -> None:
        await asyncio.sleep(seconds)

    return send


async def _hangs() -> None:
    await asyncio.Event().wait()


async def _fails() -> None:
    raise ServerError("no.")


# --- loads -----------------------------------------------------------------------------------


def test_requests_are_kept_outstanding() -> None:
    """Each response is followed by the next request; the last responses count, too."""
    result = _run(_takes(0.75), 4)
    assert len(result.latencies) == 8
    assert result.seconds == pytest.approx(1.5)
    assert result.throughput == pytest.approx(8 / 1.5)
    assert result.percentiles(50, 100) == pytest.approx([0.75, 0.75])
    assert (result.errors, result.unanswered.size) == (0, 0)


def test_a_server_that_never_answers() -> None:
    """The run ends, and unanswered requests count with their age."""
    result = _run(_hangs, 3)
    assert result.unanswered.size == 3
    assert result.unanswered.min() >= 10.0
    assert result.throughput == 0
    assert result.percentiles(100)[0] == pytest.approx(result.unanswered.max())


def test_failures_are_counted() -> None:
    """A failed request has no latency; the result has the first one's message."""
    numbers = itertools.count(1)

    async def send() -> None:
        number = next(numbers)
        await asyncio.sleep(0.01)
        if number % 2:
            raise ServerError(f"failure {number}.")

    result = _run(send, 2)
    assert result.errors == len(result.latencies) > 1
    assert result.errors + len(result.latencies) == next(numbers) - 1
    assert result.first_error == "failure 1."


def test_immediate_failures() -> None:
    """A client that raises immediately does not block the event loop."""
    sent = 0

    async def run() -> Result:
        stop = asyncio.Event()

        async def send() -> None:
            nonlocal sent
            sent += 1
            stop.set()
            raise OSError("/a/folder/of/mine refused")

        return await load_generator.run(send, 1, 2.0, stop=stop)

    result = asyncio.run(run())
    assert result.errors == sent < 100
    assert result.first_error == "OSError: mine refused"


def test_a_stop_keeps_what_was_measured() -> None:
    """A stopped run has the requests and the duration until the stop."""

    async def run() -> Result:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, stop.set)
        return await load_generator.run(_takes(0.25), 2, 100.0, stop=stop)

    result = _play(run())
    assert 1.0 <= result.seconds <= 1.25
    assert len(result.latencies) > 0
    assert result.unanswered.size == 0


# --- points ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("concurrency", "warmup"), [(2, 0.0), (1, 0.05)])
def test_statistics_are_of_the_measured_requests(concurrency: int, warmup: float) -> None:
    """Triton counts as many requests as were measured; the warm-up is not among them."""
    sent = 0
    readings: list[int] = []
    counted = [0] * 4  # Triton counts a request a little after it has answered it

    async def send() -> None:
        nonlocal sent
        sent += 1
        await asyncio.sleep(0.001)

    async def statistics() -> dict[str, Any]:
        counted.append(sent)
        readings.append(counted.pop(0))
        count = {"count": readings[-1], "ns": readings[-1] * 1000}
        return {"model_stats": [{"name": "m", "inference_stats": {"success": count}}]}

    point = _play(
        load_generator.measure(send, concurrency, 0.05, warmup=warmup, statistics=statistics)
    )
    assert point is not None
    assert point.server is not None
    assert point.concurrency == concurrency
    assert point.server.requests == len(point.result.latencies) > 0
    assert (point.server.requests < sent) == (warmup > 0)
    assert readings[-2:] == [sent] * 2


def test_a_server_without_statistics() -> None:
    """Without Triton's statistics, the client's own figures remain."""
    point = _play(load_generator.measure(_takes(0.001), 1, 0.05))
    assert point is not None
    assert point.result.latencies.size
    assert point.server is None


@pytest.mark.parametrize(
    ("send", "warmup", "says"),
    [
        (_fails, 0.0, r"concurrency 1: all \d+ requests failed; the first: no\.$"),
        (_fails, 0.02, r"all \d+ requests failed"),
        (_hangs, 0.0, "concurrency 1: none of 1 requests was answered in time"),
    ],
)
def test_no_request_is_answered(send: Send, warmup: float, says: str) -> None:
    """A load without one answer is an error, with the first failure; the warm-up, too."""
    sent = 0

    async def failing() -> None:
        nonlocal sent
        sent += 1
        await asyncio.sleep(0.001)
        await send()

    with pytest.raises(ToolError, match=says):
        _play(load_generator.measure(failing, 1, 0.05, warmup=warmup))
    assert not warmup or sent < 30


def test_stopped_in_the_warm_up() -> None:
    """A stop before the measurement gives no point."""

    async def stopped() -> Point | None:
        stop = asyncio.Event()
        stop.set()
        return await load_generator.measure(_takes(0.001), 1, 1, warmup=1, stop=stop)

    assert asyncio.run(stopped()) is None


# --- statistics ------------------------------------------------------------------------------


def _version(count: int, nanoseconds: int, batches: dict[int, int], fail: int = 0) -> Any:
    """Return a version's statistics as of HTTP."""
    time = {"count": count, "ns": nanoseconds}
    return {
        "name": "m",
        "inference_stats": {
            **dict.fromkeys(("success", *STAGES), time),
            "fail": {"count": fail, "ns": 5},
        },
        "batch_stats": [
            {"batch_size": size, "compute_infer": {"count": calls, "ns": 7}}
            for size, calls in batches.items()
        ],
    }


def _as_grpc(value: Any) -> Any:
    """Return statistics as protobuf's JSON: without zeros, large numbers as strings."""
    if isinstance(value, dict):
        return {key: _as_grpc(entry) for key, entry in value.items() if entry not in (0, [])}
    if isinstance(value, list):
        return [_as_grpc(entry) for entry in value]
    return str(value) if isinstance(value, int) else value


_BEFORE = {"model_stats": [_version(10, 1_000_000, {1: 4, 2: 3})]}
_AFTER = {"model_stats": [_version(30, 41_000_000, {1: 4, 2: 5, 4: 4}, fail=2)]}


@pytest.mark.parametrize("convert", [dict, _as_grpc], ids=["http", "grpc"])
def test_server_work(convert: Any) -> None:
    """Counts are differences; times are means of the requests between the readings."""
    work = load_generator.server_work(convert(_BEFORE), convert(_AFTER))
    assert work == ServerWork(20, 2, dict.fromkeys(STAGES, 0.002), {2: 2, 4: 4})
    assert (work.calls, work.rows) == (6, 20)


def test_versions_are_added_up() -> None:
    """Versions are added up, including new ones; those without a request have no stages."""
    statistics = {"model_stats": [*_AFTER["model_stats"], _version(5, 10_000_000, {4: 1})]}
    work = load_generator.server_work(_BEFORE, statistics)
    assert work.requests == 25
    assert work.batches == {2: 2, 4: 5}
    assert load_generator.server_work(_AFTER, _AFTER) == ServerWork()
    assert load_generator.server_work({"model_stats": [{"name": "m"}]}, {}) == ServerWork()
