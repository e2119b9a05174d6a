"""The points of a sweep, one after the other: warm-up, load, and what Triton counted meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from torch_py_backend import load, measurement
from torch_py_backend.client import Client
from torch_py_backend.errors import BenchError
from torch_py_backend.load import Load, Open, Result, Send
from torch_py_backend.measurement import Measurement

# How often, and how long apart, statistics are read until they stand still.
_LOOKS = 50
_BETWEEN_LOOKS_S = 0.02


@dataclass(frozen=True, slots=True)
class Point:
    """One load, what its requests met, and what the server did for them."""

    load: Load
    result: Result
    server: Measurement


async def point(
    client: Client,
    model: str,
    send: Send,
    shape: Load,
    *,
    seconds: float,
    warmup: float,
    stop: asyncio.Event | None = None,
) -> Point | None:
    """Measure one load; None if `stop` came before anything was measured.

    Triton's statistics are read when nothing is under way, so that they tell of these requests.

    Raises:
        BenchError: every request failed, or none was answered.
        ServerError: the server does not tell its statistics any more.
    """
    if warmup:
        _check(shape, await load.run(send, _other_times(shape), warmup, stop=stop))
    if stop is not None and stop.is_set():
        return None
    before = await _settled(client, model)
    result = await load.run(send, shape, seconds, stop=stop)
    _check(shape, result)
    after = await _settled(client, model)
    return Point(shape, result, measurement.between(before, after))


async def _settled(client: Client, model: str) -> dict[str, Any]:
    """Triton's statistics once they stand still: it counts a request after it has answered it."""
    found = await client.statistics(model)
    for _ in range(_LOOKS):  # others may use the server, too
        before = found
        await asyncio.sleep(_BETWEEN_LOOKS_S)
        found = await client.statistics(model)
        if found == before:
            break
    return found


def _other_times(shape: Load) -> Load:
    return replace(shape, seed=shape.seed + 1) if isinstance(shape, Open) else shape


def _check(shape: Load, result: Result) -> None:
    if result.latencies.size or not (result.errors or result.unanswered.size):
        return
    if result.errors:
        said = f"all {result.errors} requests failed; the first: {result.first_error.rstrip('.')}."
    else:
        said = f"none of {result.unanswered.size} requests was answered in time."
    raise BenchError(f"{named(shape)}: {said}")


def named(shape: Load) -> str:
    """A load in words."""
    if isinstance(shape, Open):
        return f"rate {shape.rate:g}"
    return f"concurrency {shape.concurrency}"
