"""Closed and open loads on a server: the results of their requests, and Triton's statistics.

A closed loop keeps a number of requests outstanding: each response is followed by the next request.
An open loop sends requests at times that are drawn before it starts, whatever the server does. Its
latencies count from the time at which a request was due, so that a stall of the server counts for
every request that it delayed, and not for one only ("coordinated omission").

The loops know no protocol: any function that returns an awaitable can send the requests.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import BackendError, BenchError, summarize

Send: TypeAlias = Callable[[], Awaitable[object]]
"""A function that sends one request and waits for its response, or raises."""
ReadStatistics: TypeAlias = Callable[[], Awaitable[JsonObject]]
"""A function that returns Triton's statistics of a model since the server's start."""

STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
# Statistics are read until two readings are equal.
_READINGS = 50
_READING_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Closed:
    """A fixed number of outstanding requests."""

    concurrency: int

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True)
class Open:
    """A rate of requests per second, at the times of a Poisson process.

    Attributes:
        rate: mean number of requests per second.
        seed: seed of the times.
        outstanding: the most requests that are sent and not answered, which bounds the memory of
            this process in an overload. Further requests wait; their latency counts from when
            they were due.
    """

    rate: float
    seed: int = 0
    outstanding: int = 1024

    def __str__(self) -> str:
        return f"rate {self.rate:g}"

    def schedule(self, seconds: float) -> list[float]:
        """Return the times at which requests are due, in seconds from the start."""
        random = np.random.default_rng(self.seed)
        # A Poisson process: a Poisson number of events, at uniformly distributed times.
        times = random.uniform(0, seconds, random.poisson(self.rate * seconds))
        due: list[float] = np.sort(times).tolist()
        return due


Load: TypeAlias = Closed | Open


@dataclass(frozen=True, slots=True)
class Result:
    """The results of the requests of one run. Times are in seconds.

    Attributes:
        seconds: duration of the load, including the wait for the last response.
        latencies: latencies of the answered requests, in the order of their responses.
        unanswered: ages of the requests that were due and unanswered at the end of the run.
        errors: number of failed requests.
        first_error: message of the first of them.
        busy: the share of a core that this process used. Near 1, this process limits the figures,
            not the server.
    """

    seconds: float
    latencies: NDArray[np.float64]
    unanswered: NDArray[np.float64]
    errors: int
    first_error: str
    busy: float

    @property
    def throughput(self) -> float:
        """Responses per second."""
        return len(self.latencies) / self.seconds

    def percentiles(self, *shares: float) -> list[float]:
        """Return percentiles of the latencies; nan without any request.

        An unanswered request counts with its age, the least that its latency can be.
        """
        times = np.concatenate([self.latencies, self.unanswered])
        if not times.size:
            return [float("nan")] * len(shares)
        values: list[float] = np.percentile(times, shares).tolist()
        return values


@dataclass(frozen=True, slots=True)
class ServerWork:
    """The work of a server for one model between two readings of Triton's statistics.

    Attributes:
        requests: answered requests.
        failures: failed requests.
        stages: the mean seconds of a request in each of Triton's stages. A stage that no request
            passed (in a composed model, or with a cached answer) is left out.
        batches: calls of the model by their number of rows.
    """

    requests: int = 0
    failures: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Calls of the model."""
        return sum(self.batches.values())

    @property
    def rows(self) -> int:
        """Rows of all calls of the model."""
        return sum(size * count for size, count in self.batches.items())


@dataclass(frozen=True, slots=True)
class Point:
    """One load, the results of its requests, and the server's work if it has statistics."""

    load: Load
    result: Result
    server: ServerWork | None


async def measure(
    send: Send,
    load: Load,
    seconds: float,
    *,
    warmup: float = 0.0,
    statistics: ReadStatistics | None = None,
    stop: asyncio.Event | None = None,
) -> Point | None:
    """Measure one load; return None if `stop` was set during the warm-up.

    Triton's statistics are read while no request is under way, so that they cover exactly the
    measured requests.

    Raises:
        BenchError: every request failed, or none was answered.
        ServerError: the server does not return its statistics.
    """
    expected = 0
    if warmup:
        if statistics:
            expected = server_work({}, await _stable_statistics(statistics)).requests
        other_times = replace(load, seed=load.seed + 1) if isinstance(load, Open) else load
        warm = await run(send, other_times, warmup, stop=stop)
        _require_answers(load, warm)
        expected += len(warm.latencies)
    if stop is not None and stop.is_set():
        return None
    before = await _stable_statistics(statistics, expected) if statistics else {}
    result = await run(send, load, seconds, stop=stop)
    _require_answers(load, result)
    if statistics is None:
        return Point(load, result, None)
    expected = server_work({}, before).requests + len(result.latencies)
    return Point(load, result, server_work(before, await _stable_statistics(statistics, expected)))


async def _stable_statistics(statistics: ReadStatistics, least: int = 0) -> JsonObject:
    """Return Triton's statistics once they no longer change and count `least` requests.

    Triton counts a request after it has answered it, on a busy machine much later.
    """
    current = await statistics()
    for _ in range(_READINGS):  # a limit, because other clients may use the server
        previous = current
        await asyncio.sleep(_READING_INTERVAL_S)
        current = await statistics()
        if current == previous and server_work({}, current).requests >= least:
            break
    return current


def _require_answers(load: Load, result: Result) -> None:
    """Raise if requests were sent and none of them was answered."""
    if result.latencies.size:
        return
    if result.errors:
        reason = result.first_error.rstrip(".")
        raise BenchError(f"{load}: all {result.errors} requests failed; the first: {reason}.")
    if count := result.unanswered.size:
        raise BenchError(f"{load}: none of {count} requests was answered in time.")


def server_work(before: JsonObject, after: JsonObject) -> ServerWork:
    """Return the difference of two statistics, summed over the model's versions.

    Statistics of gRPC leave zeros out and hold large numbers as strings; both forms are read.
    """
    change = _totals(after)
    change.subtract(_totals(before))
    return ServerWork(
        requests=change["success", "count"],
        failures=change["fail", "count"],
        stages={
            stage: change[stage, "ns"] / change[stage, "count"] / 1e9
            for stage in STAGES
            if change[stage, "count"] > 0
        },
        batches={
            int(size): count
            for (kind, size), count in sorted(change.items())
            if kind == "batch" and count > 0
        },
    )


def _totals(statistics: JsonObject) -> Counter[tuple[str, str | int]]:
    totals: Counter[tuple[str, str | int]] = Counter()
    for version in statistics.get("model_stats", ()):
        inference = version.get("inference_stats", {})
        for stage in ("success", "fail", *STAGES):
            for unit in ("count", "ns"):
                totals[stage, unit] += int(inference.get(stage, {}).get(unit, 0))
        for batch in version.get("batch_stats", ()):
            calls = batch.get("compute_infer", {}).get("count", 0)
            totals["batch", int(batch.get("batch_size", 0))] += int(calls)
    return totals


async def run(
    send: Send,
    load: Load,
    seconds: float,
    *,
    stop: asyncio.Event | None = None,
    patience: float = 10.0,
) -> Result:
    """Put a load on a server.

    Args:
        send: function that sends one request.
        load: the load.
        seconds: how long new requests are sent; above 0.
        stop: event that ends the load early; the result covers the time until then.
        patience: seconds to wait at the end for outstanding responses.
    """
    clock = asyncio.get_running_loop().time
    start, cpu = clock(), time.process_time()
    record = _Record(send, clock, end_time=start + seconds)
    driver = (
        _closed_loop(record, load)
        if isinstance(load, Closed)
        else _open_loop(record, load, seconds)
    )
    work = asyncio.ensure_future(driver)
    stopped = asyncio.ensure_future((stop or asyncio.Event()).wait())
    futures: set[asyncio.Future[Any]] = {work, stopped}
    await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not work.done():
        record.end_time = min(record.end_time, clock())
        await asyncio.wait({work}, timeout=patience)
    used, elapsed = time.process_time() - cpu, clock() - start
    unanswered = record.ages()
    work.cancel()
    await asyncio.wait({work})
    if not work.cancelled():
        work.result()
    return Result(
        seconds=max(record.end_time, record.last_response) - start,
        latencies=np.array(record.latencies, dtype=np.float64),
        unanswered=np.array(unanswered, dtype=np.float64),
        errors=record.errors,
        first_error=record.first_error,
        busy=used / elapsed if elapsed else 0.0,
    )


class _Record:
    """The requests of one run; no requests are sent after `end_time`."""

    def __init__(self, send: Send, clock: Callable[[], float], end_time: float) -> None:
        self.clock = clock
        self.end_time = end_time
        self.latencies: list[float] = []
        self.errors = 0
        self.first_error = ""
        self.last_response = 0.0
        self.scheduled: deque[float] = deque()
        self._send = send
        self._outstanding: dict[int, float] = {}
        self._sent = 0

    async def request(self, due: float) -> None:
        """Send one request; its latency counts from when it was due."""
        self._sent = number = self._sent + 1
        self._outstanding[number] = due
        try:
            await self._send()
        except Exception as error:  # any exception of a client is a failed request
            self.errors += 1
            message = str(error) if isinstance(error, BackendError) else summarize(error)
            self.first_error = self.first_error or message
            await asyncio.sleep(0)  # lets other tasks run if requests fail immediately
        else:
            self.last_response = self.clock()
            self.latencies.append(self.last_response - due)
        finally:
            del self._outstanding[number]

    def ages(self) -> list[float]:
        """Return the ages of the unanswered requests that were due."""
        now = self.clock()
        waiting = (*self._outstanding.values(), *self.scheduled)
        return [now - due for due in waiting if due <= self.end_time]


async def _closed_loop(record: _Record, load: Closed) -> None:
    async def send_in_turn() -> None:
        while (now := record.clock()) < record.end_time:
            await record.request(now)

    await asyncio.gather(*(send_in_turn() for _ in range(load.concurrency)))


async def _open_loop(record: _Record, load: Open, seconds: float) -> None:
    start = record.clock()
    record.scheduled.extend(start + due for due in load.schedule(seconds))
    free = asyncio.Semaphore(load.outstanding)
    tasks: set[asyncio.Task[None]] = set()

    def on_done(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        free.release()

    try:
        while record.scheduled and record.scheduled[0] < record.end_time:
            if (delay := record.scheduled[0] - record.clock()) > 0:
                await asyncio.sleep(delay)
                continue  # the load may have ended
            await free.acquire()
            task = asyncio.create_task(record.request(record.scheduled.popleft()))
            tasks.add(task)
            task.add_done_callback(on_done)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class _FineSelector(selectors.EpollSelector):
    """A selector with time-outs in microseconds: select() on the descriptor of epoll.

    epoll itself rounds time-outs up to milliseconds.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for open loads; asyncio's own sends requests up to 1 ms late."""
    return asyncio.SelectorEventLoop(_FineSelector())
