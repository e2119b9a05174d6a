"""One point of a benchmark: a warm-up, a load, and Triton's statistics of that load."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from torch_py_backend.errors import BenchError
from torch_py_backend.tools import load_generator, server_statistics
from torch_py_backend.tools.load_client import Client
from torch_py_backend.tools.load_generator import Load, Open, Result, Send
from torch_py_backend.tools.server_statistics import Measurement

# Statistics are read until two readings are equal.
_READINGS = 50
_READING_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Point:
    """One load, the results of its requests, and the server's statistics."""

    load: Load
    result: Result
    server: Measurement


async def point(
    client: Client,
    model: str,
    send: Send,
    load: Load,
    *,
    seconds: float,
    warmup: float,
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
        started = _requests(await _stable_statistics(client, model))
        other_times = replace(load, seed=load.seed + 1) if isinstance(load, Open) else load
        warm = await load_generator.run(send, other_times, warmup, stop=stop)
        _check(load, warm)
        expected = started + len(warm.latencies)
    if stop is not None and stop.is_set():
        return None
    before = await _stable_statistics(client, model, expected)
    result = await load_generator.run(send, load, seconds, stop=stop)
    _check(load, result)
    after = await _stable_statistics(client, model, _requests(before) + len(result.latencies))
    return Point(load, result, server_statistics.between(before, after))


async def _stable_statistics(client: Client, model: str, least: int = 0) -> dict[str, Any]:
    """Return Triton's statistics once they no longer change and count `least` requests.

    Triton counts a request after it has answered it, on a busy machine much later.
    """
    current = await client.statistics(model)
    for _ in range(_READINGS):  # a limit, because other clients may use the server
        previous = current
        await asyncio.sleep(_READING_INTERVAL_S)
        current = await client.statistics(model)
        if current == previous and _requests(current) >= least:
            break
    return current


def _requests(statistics: dict[str, Any]) -> int:
    return server_statistics.between({}, statistics).requests


def _check(load: Load, result: Result) -> None:
    if result.latencies.size or not (result.errors or result.unanswered.size):
        return
    if result.errors:
        reason = (
            f"all {result.errors} requests failed; the first: {result.first_error.rstrip('.')}."
        )
    else:
        reason = f"none of {result.unanswered.size} requests was answered in time."
    raise BenchError(f"{title(load)}: {reason}")


def title(load: Load) -> str:
    """Return a load in words."""
    if isinstance(load, Open):
        return f"rate {load.rate:g}"
    return f"concurrency {load.concurrency}"
