"""Measure two servers in turn, A B A B …, and compare them within each pair.

The speed of a machine drifts by tens of percent within minutes, but hardly between two consecutive
turns. Both servers stay up, and one is loaded at a time.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator
from dataclasses import dataclass

from benchmarks import clients
from benchmarks.clients import Endpoint, Statistics
from torch_py_backend.errors import BenchError
from torch_py_backend.tools import load_generator, server_statistics
from torch_py_backend.tools.load_generator import Closed, Send


@dataclass(frozen=True)
class Turn:
    """One load on one server. Latencies are in seconds.

    Attributes:
        throughput: responses per second.
        batch: mean requests in a call of the model; None if the server does not report it.
        busy: the share of a core that the client used.
    """

    throughput: float
    p50: float
    p99: float
    batch: float | None
    busy: float


@dataclass(frozen=True)
class Pair:
    """A turn of our server and the following turn of the other server."""

    ours: Turn
    other: Turn

    @property
    def ratio(self) -> float:
        """Our throughput divided by the other's."""
        return self.ours.throughput / self.other.throughput


@dataclass(frozen=True)
class Spread:
    """The median, minimum and maximum of several values."""

    median: float
    least: float
    most: float


def spread(values: list[float]) -> Spread:
    """Return the spread of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


async def measure(
    ours: Endpoint, other: Endpoint, concurrency: int, seconds: float, pairs: int
) -> AsyncIterator[Pair]:
    """Yield the pairs as they are measured, after one turn to warm up each server.

    Raises:
        BenchError: a request failed.
    """
    async with clients.connected(ours) as first, clients.connected(other) as second:
        for connection in (first, second):
            await _turn(*connection, concurrency, seconds)
        for _ in range(pairs):
            yield Pair(
                await _turn(*first, concurrency, seconds),
                await _turn(*second, concurrency, seconds),
            )


async def _turn(send: Send, counted: Statistics | None, concurrency: int, seconds: float) -> Turn:
    before = await counted() if counted else {}
    result = await load_generator.run(send, Closed(concurrency), seconds)
    if result.errors or result.unanswered.size or not result.latencies.size:
        raise BenchError(
            f"{result.errors} requests failed and {result.unanswered.size} had no answer:"
            f" {result.first_error or 'no error was reported'}"
        )
    batch = None
    if counted:
        done = server_statistics.between(before, await counted())
        batch = done.rows / done.calls
    p50, p99 = result.percentiles(50, 99)
    return Turn(result.throughput, p50, p99, batch, result.busy)
