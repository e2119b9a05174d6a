"""Closed and open loads on a simulated clock, and Triton's statistics of them."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from torch_py_backend.errors import BenchError, ServerError
from torch_py_backend.tools import load_generator
from torch_py_backend.tools.load_generator import (
    STAGES,
    Closed,
    Load,
    Open,
    Point,
    Result,
    Send,
    ServerWork,
)

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


def _run(send: Send, load: Load, seconds: float, **options: Any) -> Result:
    return _play(load_generator.run(send, load, seconds, **options))


def _takes(seconds: float) -> Send:
    async def send() -> None:
        await asyncio.sleep(seconds)

    return send


async def _hangs() -> None:
    await asyncio.Event().wait()


# --- loads -----------------------------------------------------------------------------------


def test_a_closed_loop_keeps_requests_outstanding() -> None:
    """Each response is followed by the next request; the last responses count, too."""
    result = _run(_takes(0.75), Closed(4), 1.0)
    assert len(result.latencies) == 8
    assert result.seconds == pytest.approx(1.5)
    assert result.throughput == pytest.approx(8 / 1.5)
    assert result.percentiles(50, 100) == pytest.approx([0.75, 0.75])
    assert (result.errors, result.unanswered.size) == (0, 0)


def test_an_open_loop_sends_at_the_times_of_its_schedule() -> None:
    """Requests are sent when they are due, however long the responses take."""
    load = Open(rate=50, seed=3)
    sent: list[float] = []

    async def send() -> None:
        sent.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.5)

    result = _run(send, load, 2.0)
    assert sent == pytest.approx(load.schedule(2.0))
    assert result.percentiles(0, 100) == pytest.approx([0.5, 0.5])


def test_a_schedule_is_a_poisson_process() -> None:
    """A schedule has the rate's number of requests at exponential gaps, fixed by the seed."""
    due = np.array(Open(rate=1000, seed=1).schedule(20.0))
    gaps = np.diff(due)
    assert len(due) == pytest.approx(20_000, rel=0.03)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(gaps.std(), rel=0.05)
    assert due[-1] < 20.0
    assert due.tolist() == Open(rate=1000, seed=1).schedule(20.0)
    assert due.tolist() != Open(rate=1000, seed=2).schedule(20.0)


@pytest.mark.parametrize("outstanding", [1, 1024], ids=["waits-here", "waits-there"])
def test_latency_counts_from_when_a_request_was_due(outstanding: int) -> None:
    """The latency of a request includes its wait, whether it was sent already or not."""
    load = Open(rate=100, seed=0, outstanding=outstanding)
    due = np.array(load.schedule(1.0))
    # The server has half the capacity: each request waits for those before.
    ends, now = [], 0.0
    for time in due:
        now = max(now, time) + 0.02
        ends.append(now)

    async def run() -> Result:
        lock = asyncio.Lock()

        async def send() -> None:
            async with lock:
                await asyncio.sleep(0.02)

        return await load_generator.run(send, load, 1.0)

    result = _play(run())
    assert result.latencies == pytest.approx(np.array(ends) - due)
    assert result.throughput == pytest.approx(len(due) / ends[-1])


def test_outstanding_requests_are_bounded() -> None:
    """At most the given number of requests is outstanding."""
    now, most = 0, 0

    async def send() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(1.0)
        now -= 1

    _run(send, Open(rate=1000, outstanding=7), 1.0, patience=1.0)
    assert most == 7


@pytest.mark.parametrize(
    ("load", "count"),
    [
        (Closed(3), 3),
        (Open(rate=20, seed=1), len(Open(rate=20, seed=1).schedule(1.0))),
        (Open(rate=20, seed=1, outstanding=2), len(Open(rate=20, seed=1).schedule(1.0))),
    ],
    ids=["closed", "open", "open-bounded"],
)
def test_a_server_that_never_answers(load: Load, count: int) -> None:
    """The run ends, and unanswered requests count with their age."""
    result = _run(_hangs, load, 1.0, patience=2.0)
    assert result.unanswered.size == count
    assert (result.unanswered >= 2.0 - 1e-9).all()
    assert (result.unanswered <= 3.0 + 1e-9).all()
    assert result.throughput == 0
    assert result.percentiles(100)[0] == pytest.approx(result.unanswered.max())


@pytest.mark.parametrize("load", [Closed(2), Open(rate=50)], ids=["closed", "open"])
def test_failures_are_counted(load: Load) -> None:
    """A failed request has no latency; the result has the first one's message."""
    count = 0

    async def send() -> None:
        nonlocal count
        count += 1
        await asyncio.sleep(0.01)
        if count % 2:
            raise ServerError(f"failure {count}.")

    result = _run(send, load, 1.0)
    assert result.errors > 0
    assert len(result.latencies) > 0
    assert result.errors + len(result.latencies) == count
    assert result.first_error.startswith("failure ")


def test_immediate_failures() -> None:
    """A client that raises immediately does not block the event loop."""

    async def send() -> None:
        await asyncio.sleep(0.1 if sent else 0)
        sent.append(1)
        raise OSError("/a/folder/of/mine refused")

    sent: list[int] = []
    result = _run(send, Closed(1), 1.0)
    assert result.errors == len(sent)
    assert result.first_error == "OSError: mine refused"
    assert np.isnan(result.percentiles(50)).all()


@pytest.mark.parametrize("load", [Closed(2), Open(rate=100)], ids=["closed", "open"])
def test_a_stop_keeps_what_was_measured(load: Load) -> None:
    """A stopped run has the requests and the duration until the stop."""

    async def run() -> Result:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, stop.set)
        return await load_generator.run(_takes(0.25), load, 100.0, stop=stop)

    result = _play(run())
    assert 1.0 <= result.seconds <= 1.25
    assert len(result.latencies) > 0
    assert result.unanswered.size == 0


def test_no_request_was_due() -> None:
    """A rate too low for the duration gives an empty result, not an error."""
    result = _run(_takes(0.1), Open(rate=1e-6), 2.0)
    assert (result.throughput, result.seconds) == (0, 2.0)
    assert np.isnan(result.percentiles(50, 99)).all()


def test_the_event_loop_waits_for_fractions_of_a_millisecond() -> None:
    """The event loop supports time-outs below a millisecond."""
    loop = load_generator.event_loop()
    try:
        loop.run_until_complete(asyncio.sleep(0.0001))
        assert loop.run_until_complete(asyncio.sleep(0, "back")) == "back"
    finally:
        loop.close()


# --- points ----------------------------------------------------------------------------------


class _Counting:
    """A server that counts its requests, as Triton's statistics do."""

    def __init__(self, *, late: int = 1) -> None:
        self.requests = 0
        self.readings: list[int] = []
        # Triton counts a request a little after it has answered it.
        self._counted = [0] * late

    async def statistics(self) -> dict[str, Any]:
        self._counted.append(self.requests)
        counted = self._counted.pop(0)
        self.readings.append(counted)
        count = {"count": counted, "ns": counted * 1000}
        return {"model_stats": [{"name": "m", "inference_stats": {"success": count}}]}

    async def send(self) -> None:
        self.requests += 1
        await asyncio.sleep(0.001)


def _measure(send: Send, load: Load, **options: Any) -> Point | None:
    return _play(load_generator.measure(send, load, 0.05, **options))


@pytest.mark.parametrize(
    ("load", "warmup", "late"), [(Closed(2), 0.0, 4), (Open(400), 0.05, 1), (Closed(1), 0.05, 4)]
)
def test_statistics_are_of_the_measured_requests(load: Load, warmup: float, late: int) -> None:
    """Triton counts as many requests as were measured; the warm-up is not among them."""
    server = _Counting(late=late)
    point = _measure(server.send, load, warmup=warmup, statistics=server.statistics)
    assert point is not None
    assert point.server is not None
    assert point.load == load
    assert point.server.requests == len(point.result.latencies) > 0
    assert (point.server.requests < server.requests) == (warmup > 0)
    assert server.readings[-2:] == [server.requests] * 2


def test_a_server_without_statistics() -> None:
    """Without Triton's statistics, the client's own figures remain."""
    point = _measure(_takes(0.001), Closed(1))
    assert point is not None
    assert point.result.latencies.size
    assert point.server is None


@pytest.mark.parametrize("warmup", [0.0, 0.02])
def test_all_requests_fail(warmup: float) -> None:
    """A load without one answer is an error with the first failure."""

    async def send() -> None:
        raise ServerError("no.")

    with pytest.raises(BenchError, match=r"concurrency 1: all \d+ requests failed; the first: no."):
        asyncio.run(load_generator.measure(send, Closed(1), 0.01, warmup=warmup))


def test_no_request_is_answered() -> None:
    """A load without an answer in time is an error."""
    with pytest.raises(BenchError, match=r"rate 400: none of \d+ requests was answered in time"):
        _measure(_hangs, Open(400))


def test_stopped_in_the_warm_up() -> None:
    """A stop before the measurement gives no point."""

    async def stopped() -> Point | None:
        stop = asyncio.Event()
        stop.set()
        return await load_generator.measure(_takes(0.001), Closed(1), 1, warmup=1, stop=stop)

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
    """Versions are added up, including new ones."""
    statistics = {"model_stats": [*_AFTER["model_stats"], _version(5, 10_000_000, {4: 1})]}
    work = load_generator.server_work(_BEFORE, statistics)
    assert work.requests == 25
    assert work.batches == {2: 2, 4: 5}


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {}), (_AFTER, _AFTER), ({"model_stats": [{"name": "m"}]}, {"model_stats": []})],
    ids=["nothing", "no-change", "bare"],
)
def test_an_idle_server(before: Any, after: Any) -> None:
    """Without a request, counts are zero and there are no stages."""
    assert load_generator.server_work(before, after) == ServerWork(0, 0, {}, {})
