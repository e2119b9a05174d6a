"""Load on a server, in a closed or an open loop, and what became of the requests.

A closed loop keeps a number of requests outstanding: the next one is sent when an answer came. An
open loop sends at times that were drawn before it started, whatever the server does, and a latency
counts from the time at which its request was due: a server that stalls is charged with all the
requests that it kept waiting, and not with one ("coordinated omission").

What is sent is any function that returns an awaitable; the loops know no protocol.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torch_py_backend.errors import BackendError, brief

Send = Callable[[], Awaitable[object]]
"""Sends one request and waits for its answer; raises what went wrong."""


@dataclass(frozen=True, slots=True)
class Closed:
    """So many requests outstanding at any time."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class Open:
    """So many requests a second on average, at the times of a Poisson process.

    Attributes:
        rate: requests a second.
        seed: of the times; equal seeds give equal times.
        outstanding: requests sent and not answered at most. Those that are due beyond that wait,
            and their latency counts on: an overload must not use up this process.
    """

    rate: float
    seed: int = 0
    outstanding: int = 1024

    def schedule(self, seconds: float) -> list[float]:
        """When requests are due, in seconds from the start."""
        random = np.random.default_rng(self.seed)
        # A Poisson process: so many events as the distribution says, each at any time alike.
        times = random.uniform(0, seconds, random.poisson(self.rate * seconds))
        due: list[float] = np.sort(times).tolist()
        return due


Load: TypeAlias = Closed | Open


@dataclass(frozen=True, slots=True)
class Result:
    """What became of the requests of one run. Times are in seconds.

    Attributes:
        seconds: how long the load lasted, the wait for the last answer included.
        latencies: of the requests that were answered, in the order of their answers.
        unanswered: the ages of those that were due and had no answer when the run ended.
        errors: how many requests failed.
        first_error: what the first of them said.
        busy: the share of a core that this process used; near 1 it was this process, and not
            the server, that set the figures.
    """

    seconds: float
    latencies: NDArray[np.float64]
    unanswered: NDArray[np.float64]
    errors: int
    first_error: str
    busy: float

    @property
    def throughput(self) -> float:
        """Answers a second."""
        return len(self.latencies) / self.seconds

    def percentiles(self, *shares: float) -> list[float]:
        """The latencies that these percentages of the requests did not exceed; nan if none came.

        An unanswered request takes part with its age: its latency would have been no less.
        """
        known = np.concatenate([self.latencies, self.unanswered])
        if not known.size:
            return [float("nan")] * len(shares)
        values: list[float] = np.percentile(known, shares).tolist()
        return values


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
        send: what sends one request.
        load: when requests are sent.
        seconds: how long new requests are sent; above 0.
        stop: ends the load when it is set; the result then tells of the time until there.
        patience: seconds to wait, after that, for answers that are still due.
    """
    clock = asyncio.get_running_loop().time
    start, cpu = clock(), time.process_time()
    record = _Record(send, clock, end=start + seconds)
    driver = _closed(record, load) if isinstance(load, Closed) else _open(record, load, seconds)
    work = asyncio.ensure_future(driver)
    await _until(work, stop, seconds)
    if not work.done():
        record.end = min(record.end, clock())
        await asyncio.wait({work}, timeout=patience)
    used, elapsed = time.process_time() - cpu, clock() - start
    unanswered = record.ages()
    work.cancel()
    await asyncio.wait({work})
    if not work.cancelled():
        work.result()
    return Result(
        seconds=max(record.end, record.last) - start,
        latencies=np.array(record.latencies, dtype=np.float64),
        unanswered=np.array(unanswered, dtype=np.float64),
        errors=record.errors,
        first_error=record.first_error,
        busy=used / elapsed if elapsed else 0.0,
    )


class _Record:
    """The requests of one run: begun, answered, failed. `end` is when no new ones are sent."""

    def __init__(self, send: Send, clock: Callable[[], float], end: float) -> None:
        self.clock = clock
        self.end = end
        self.latencies: list[float] = []
        self.errors = 0
        self.first_error = ""
        self.last = 0.0
        self.scheduled: deque[float] = deque()
        self._send = send
        self._outstanding: dict[int, float] = {}
        self._begun = 0

    async def request(self, due: float) -> None:
        """One request; its latency counts from when it was due."""
        self._begun = number = self._begun + 1
        self._outstanding[number] = due
        try:
            await self._send()
        except Exception as error:  # whatever a client raises is a failed request
            self.errors += 1
            self.first_error = self.first_error or _sentence(error)
            await asyncio.sleep(0)  # what fails at once must not keep the others from running
        else:
            self.last = self.clock()
            self.latencies.append(self.last - due)
        finally:
            del self._outstanding[number]

    def ages(self) -> list[float]:
        """How long ago those without an answer were due."""
        now = self.clock()
        waiting = (*self._outstanding.values(), *self.scheduled)
        return [now - due for due in waiting if due <= self.end]


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, BackendError) else brief(error)


async def _until(work: asyncio.Future[None], stop: asyncio.Event | None, seconds: float) -> None:
    """Wait for the first of the three."""
    stopped = asyncio.ensure_future((stop or asyncio.Event()).wait())
    first: set[asyncio.Future[Any]] = {work, stopped}
    await asyncio.wait(first, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()


async def _closed(record: _Record, load: Closed) -> None:
    async def one_after_another() -> None:
        while (now := record.clock()) < record.end:
            await record.request(now)

    await asyncio.gather(*(one_after_another() for _ in range(load.concurrency)))


async def _open(record: _Record, load: Open, seconds: float) -> None:
    start = record.clock()
    record.scheduled.extend(start + due for due in load.schedule(seconds))
    free = asyncio.Semaphore(load.outstanding)
    tasks: set[asyncio.Task[None]] = set()

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        free.release()

    try:
        while record.scheduled and record.scheduled[0] < record.end:
            if (delay := record.scheduled[0] - record.clock()) > 0:
                await asyncio.sleep(delay)
                continue  # the end may have come meanwhile
            await free.acquire()
            task = asyncio.create_task(record.request(record.scheduled.popleft()))
            tasks.add(task)
            task.add_done_callback(ended)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class _FineSelector(selectors.EpollSelector):
    """epoll waits for whole milliseconds; select, on epoll's own descriptor, for microseconds."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def event_loop() -> asyncio.AbstractEventLoop:
    """An event loop for open loads: asyncio's own sends each request up to 1 ms late."""
    return asyncio.SelectorEventLoop(_FineSelector())
