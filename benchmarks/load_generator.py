"""A load on a server: the results of its requests, and Triton's statistics of them.

The load is a closed loop: it keeps a number of requests outstanding, and each response is followed
by the next request. It knows no protocol: any function that returns an awaitable can send requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import BackendError, ToolError, summarize

Send: TypeAlias = Callable[[], Awaitable[object]]
"""A function that sends one request and waits for its response, or raises."""
ReadStatistics: TypeAlias = Callable[[], Awaitable[JsonObject]]
"""A function that returns Triton's statistics of a model since the server's start."""

STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
# Statistics are read until two readings are equal.
_MAX_READINGS = 50
_READING_INTERVAL_S = 0.05
# The wait for outstanding responses at the end.
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Result:
    """The results of the requests of one run. Times are in seconds.

    Attributes:
        seconds: duration of the load, including the wait for the last response.
        latencies: latencies of the answered requests, in the order of their responses.
        unanswered: ages of the requests that were unanswered at the end of the run.
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
        """Return percentiles of the latencies.

        An unanswered request counts with its age, the least that its latency can be.
        """
        times = np.concatenate([self.latencies, self.unanswered])
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
    """A number of outstanding requests, their results, and the server's work if it is known."""

    concurrency: int
    result: Result
    server: ServerWork | None


async def measure(
    send: Send,
    concurrency: int,
    seconds: float,
    *,
    warmup: float = 0.0,
    statistics: ReadStatistics | None = None,
    stop: asyncio.Event | None = None,
) -> Point | None:
    """Measure one load; return None if `stop` was set before a measured request was answered.

    Triton's statistics are read while no request is under way, so that they cover exactly the
    measured requests.

    Raises:
        ToolError: every request failed, or none was answered.
        ToolError: the server does not return its statistics.
    """
    before: JsonObject = await _stable_statistics(statistics) if statistics else {}
    if warmup:
        warm = await run(send, concurrency, warmup, stop=stop)
        _require_answers(concurrency, warm)
        if stop is not None and stop.is_set():
            return None
        if statistics:
            before = await _stable_statistics(statistics, before, len(warm.latencies))
    result = await run(send, concurrency, seconds, stop=stop)
    _require_answers(concurrency, result)
    if not result.latencies.size:
        return None
    if statistics is None:
        return Point(concurrency, result, None)
    after = await _stable_statistics(statistics, before, len(result.latencies))
    return Point(concurrency, result, server_work(before, after))


def _require_answers(concurrency: int, result: Result) -> None:
    """Raise if requests were sent and none of them was answered."""
    if result.latencies.size:
        return
    if result.errors:
        reason = result.first_error.rstrip(".")
        raise ToolError(
            f"concurrency {concurrency}: all {result.errors} requests failed; the first: {reason}."
        )
    if count := result.unanswered.size:
        raise ToolError(
            f"concurrency {concurrency}: none of {count} requests was answered in time."
        )


async def _stable_statistics(
    statistics: ReadStatistics, before: JsonObject | None = None, answered: int = 0
) -> JsonObject:
    """Return Triton's statistics once they no longer change and count the answered requests.

    Triton counts a request after it has answered it, on a busy machine much later.
    """
    current = await statistics()
    for _ in range(_MAX_READINGS):  # a limit, because other clients may use the server
        previous = current
        await asyncio.sleep(_READING_INTERVAL_S)
        current = await statistics()
        if current == previous and server_work(before or {}, current).requests >= answered:
            break
    return current


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
    send: Send, concurrency: int, seconds: float, *, stop: asyncio.Event | None = None
) -> Result:
    """Put a load on a server.

    Args:
        send: function that sends one request.
        concurrency: the number of outstanding requests.
        seconds: how long new requests are sent; above 0.
        stop: event that ends the load early; the result covers the time until then.
    """
    clock = asyncio.get_running_loop().time
    start, cpu = clock(), time.process_time()
    end, last_response, errors, first_error = start + seconds, start, 0, ""
    latencies: list[float] = []
    outstanding: dict[int, float] = {}

    async def send_in_turn(worker: int) -> None:
        nonlocal last_response, errors, first_error
        while (sent := clock()) < end:
            outstanding[worker] = sent
            try:
                await send()
            except Exception as error:  # any exception of a client is a failed request
                errors += 1
                message = str(error) if isinstance(error, BackendError) else summarize(error)
                first_error = first_error or message
                await asyncio.sleep(0)  # lets other tasks run if requests fail immediately
            else:
                last_response = clock()
                latencies.append(last_response - sent)
            del outstanding[worker]

    workers = [asyncio.create_task(send_in_turn(number)) for number in range(concurrency)]
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for((stop or asyncio.Event()).wait(), seconds)
    end = min(end, clock())
    await asyncio.wait(workers, timeout=_PATIENCE_S)
    now, used = clock(), time.process_time() - cpu
    unanswered = [now - sent for sent in outstanding.values()]
    for worker in workers:
        worker.cancel()
    await asyncio.wait(workers)
    return Result(
        seconds=max(end, last_response) - start,
        latencies=np.array(latencies, dtype=np.float64),
        unanswered=np.array(unanswered, dtype=np.float64),
        errors=errors,
        first_error=first_error,
        busy=used / (now - start) if now > start else 0.0,
    )
