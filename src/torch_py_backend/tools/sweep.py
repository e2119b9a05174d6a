"""The points of a sweep, one after the other: warm-up, load, and what Triton counted meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from torch_py_backend.errors import BenchError
from torch_py_backend.tools import load_generator, server_statistics
from torch_py_backend.tools.load_client import Client
from torch_py_backend.tools.load_generator import Load, Open, Result, Send
from torch_py_backend.tools.server_statistics import Measurement

# How often, and how long apart, statistics are read until they stand still.
_LOOKS = 50
_BETWEEN_LOOKS_S = 0.05


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
    counted = 0
    if warmup:
        begun = _requests(await _settled(client, model))
        warm = await load_generator.run(send, _other_times(shape), warmup, stop=stop)
        _check(shape, warm)
        counted = begun + len(warm.latencies)
    if stop is not None and stop.is_set():
        return None
    before = await _settled(client, model, counted)
    result = await load_generator.run(send, shape, seconds, stop=stop)
    _check(shape, result)
    after = await _settled(client, model, _requests(before) + len(result.latencies))
    return Point(shape, result, server_statistics.between(before, after))


async def _settled(client: Client, model: str, least: int = 0) -> dict[str, Any]:
    """Triton's statistics once they stand still and tell of at least so many requests.

    It counts a request after it has answered it, on a busy machine long after.
    """
    found = await client.statistics(model)
    for _ in range(_LOOKS):  # others may use the server, too
        before = found
        await asyncio.sleep(_BETWEEN_LOOKS_S)
        found = await client.statistics(model)
        if found == before and _requests(found) >= least:
            break
    return found


def _requests(statistics: dict[str, Any]) -> int:
    return server_statistics.between({}, statistics).requests


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
