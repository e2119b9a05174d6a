"""Closed and open loads on a simulated clock."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from torch_py_backend.errors import ServerError
from torch_py_backend.tools import load_generator
from torch_py_backend.tools.load_generator import Closed, Load, Open, Result

_T = TypeVar("_T")


class _SimulatedClock(selectors.SelectSelector):
    """A selector that advances the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


def play(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on the simulated clock."""
    selector = _SimulatedClock()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def _run(send: load_generator.Send, shape: Load, seconds: float, **options: Any) -> Result:
    async def played() -> Result:
        return await load_generator.run(send, shape, seconds, **options)

    return play(played())


def _takes(seconds: float) -> load_generator.Send:
    async def send() -> None:
        await asyncio.sleep(seconds)

    return send


def _one_at_a_time(seconds: float) -> Callable[[], load_generator.Send]:
    """Return a server that answers one request after the other."""

    def connect() -> load_generator.Send:
        lock = asyncio.Lock()

        async def send() -> None:
            async with lock:
                await asyncio.sleep(seconds)

        return send

    return connect


async def _hangs() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("concurrency", "answers"), [(1, 8), (4, 32)])
def test_a_closed_loop_keeps_requests_outstanding(concurrency: int, answers: int) -> None:
    """Each response is followed by the next request."""
    result = _run(_takes(0.125), Closed(concurrency), 1.0)
    assert len(result.latencies) == answers
    assert result.throughput == pytest.approx(answers)
    assert result.percentiles(50, 100) == pytest.approx([0.125, 0.125])
    assert result.seconds == pytest.approx(1.0)
    assert (result.errors, result.unanswered.size) == (0, 0)


def test_a_closed_loop_waits_for_its_last_answers() -> None:
    """A request sent before the end counts, as does the time until its response."""
    result = _run(_takes(0.75), Closed(2), 1.0)
    assert len(result.latencies) == 4
    assert result.seconds == pytest.approx(1.5)


def test_an_open_loop_sends_at_the_times_of_its_schedule() -> None:
    """Requests are sent when they are due, however long the responses take."""
    shape = Open(rate=50, seed=3)
    sent: list[float] = []

    async def send() -> None:
        sent.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.5)

    result = _run(send, shape, 2.0)
    assert sent == pytest.approx(shape.schedule(2.0))
    assert result.percentiles(0, 100) == pytest.approx([0.5, 0.5])


def test_a_schedule_is_a_poisson_process() -> None:
    """A schedule has the rate's number of requests, with exponentially distributed gaps."""
    due = np.array(Open(rate=1000, seed=1).schedule(20.0))
    gaps = np.diff(due)
    assert len(due) == pytest.approx(20_000, rel=0.03)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(gaps.std(), rel=0.05)
    assert due[-1] < 20.0


@pytest.mark.parametrize(("other", "same"), [(1, True), (2, False)])
def test_a_seed_fixes_the_schedule(other: int, *, same: bool) -> None:
    """Two runs with one seed send at the same times."""
    first, second = (Open(rate=10, seed=seed).schedule(5.0) for seed in (1, other))
    assert (first == second) == same


@pytest.mark.parametrize("outstanding", [1, 1024], ids=["waits-here", "waits-there"])
def test_latency_counts_from_when_a_request_was_due(outstanding: int) -> None:
    """The latency of a request includes its wait, whether it was sent already or not."""
    shape = Open(rate=100, seed=0, outstanding=outstanding)
    due = np.array(shape.schedule(1.0))
    # The server has half the capacity: each request waits for those before.
    ends, now = [], 0.0
    for time in due:
        now = max(now, time) + 0.02
        ends.append(now)

    async def played() -> Result:
        return await load_generator.run(_one_at_a_time(0.02)(), shape, 1.0)

    result = play(played())
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
    ("shape", "count"),
    [
        (Closed(3), 3),
        (Open(rate=20, seed=1), len(Open(rate=20, seed=1).schedule(1.0))),
        (Open(rate=20, seed=1, outstanding=2), len(Open(rate=20, seed=1).schedule(1.0))),
    ],
    ids=["closed", "open", "open-bounded"],
)
def test_a_server_that_never_answers(shape: Load, count: int) -> None:
    """The run ends, and unanswered requests count with their age."""
    result = _run(_hangs, shape, 1.0, patience=2.0)
    assert result.unanswered.size == count
    assert (result.unanswered >= 2.0 - 1e-9).all()
    assert (result.unanswered <= 3.0 + 1e-9).all()
    assert result.throughput == 0
    assert result.percentiles(100)[0] == pytest.approx(result.unanswered.max())


@pytest.mark.parametrize("shape", [Closed(2), Open(rate=50)], ids=["closed", "open"])
def test_failures_are_counted(shape: Load) -> None:
    """A failed request has no latency; the result has the first one's message."""
    count = 0

    async def send() -> None:
        nonlocal count
        count += 1
        await asyncio.sleep(0.01)
        if count % 2:
            raise ServerError(f"failure {count}.")

    result = _run(send, shape, 1.0)
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


@pytest.mark.parametrize("shape", [Closed(2), Open(rate=100)], ids=["closed", "open"])
def test_a_stop_keeps_what_was_measured(shape: Load) -> None:
    """A stopped run has the requests and the duration until the stop."""

    async def played() -> Result:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, stop.set)
        return await load_generator.run(_takes(0.25), shape, 100.0, stop=stop)

    result = play(played())
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
