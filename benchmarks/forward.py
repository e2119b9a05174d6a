"""Measure the time that our backend takes around the model's forward().

    python -m benchmarks.forward [--model mlp] [--concurrency 1,8,32] [--seconds 5]

The instance measures the times (`served/clock.py`). The time of a whole request, including its wait
in the queue, comes from Triton's statistics.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import clients, repositories
from benchmarks.clients import Endpoint
from benchmarks.contenders import check
from benchmarks.models import MODELS
from torch_py_backend.errors import BenchError
from torch_py_backend.server import Server
from torch_py_backend.tools import load_generator
from torch_py_backend.tools.load_generator import Closed

_LOAD_SECONDS = 120
_COLUMNS = (
    "model", "concurrency", "batch",
    "request, ms", "forward, ms", "engine, ms", "messages, ms", "share",
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """The parts of a request's time in seconds, as means over requests.

    Attributes:
        batch: mean requests in a call.
        request: Triton's whole time for a request.
        forward: bare forward of the batch that the request was in.
        engine: the engine without forward: gather, bind, check, scatter.
        messages: `execute` without the engine: read requests, write responses.
    """

    model: str
    concurrency: int
    batch: float
    request: float
    forward: float
    engine: float
    messages: float

    @property
    def share(self) -> float:
        """Our share of the time of a request."""
        return (self.engine + self.messages) / self.request


def measure(model: str, concurrency: int, seconds: float) -> Cost:
    """Serve a timed model and put load on it.

    Raises:
        BenchError: the model did not load, or a request failed.
    """
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        folder = Path(scratch)
        repository, clock = folder / "repository", folder / "clock.json"
        repositories.write_clocked(model, repository, clock)
        with (
            (folder / "server.log").open("wb") as log,
            Server(repository, http_port=0, grpc_port=0, metrics_port=0, log=log) as server,
        ):
            for state in server.wait_loaded(timeout=_LOAD_SECONDS):
                if not state.ready:
                    raise BenchError(f"{state.name} was not loaded: {state.reason}")
            endpoint = Endpoint(model, "grpc", server.grpc_address, model, counts=True)
            check(endpoint)
            request = asyncio.run(_load(endpoint, concurrency, seconds))
        return cost(model, concurrency, json.loads(clock.read_text()), request)


async def _load(endpoint: Endpoint, concurrency: int, seconds: float) -> float:
    """Return Triton's mean time of a request in seconds."""
    async with clients.connected(endpoint) as (send, statistics):
        assert statistics is not None  # noqa: S101  it is a tritonserver
        result = await load_generator.run(send, Closed(concurrency), seconds)
        if result.errors or not result.latencies.size:
            raise BenchError(f"{result.errors} requests failed: {result.first_error}")
        return _mean_request(await statistics())


def _mean_request(document: Mapping[str, Any]) -> float:
    done = document["model_stats"][0]["inference_stats"]["success"]
    return int(done["ns"]) / int(done["count"]) / 1e9


def cost(
    model: str, concurrency: int, clock: Mapping[str, Mapping[str, float]], request: float
) -> Cost:
    """Return the times by request, each of which waits for its whole batch.

    Args:
        model: the model's name.
        concurrency: the requests outstanding.
        clock: number of calls and seconds on each clock, by requests in a call.
        request: Triton's mean time for a request, in seconds.
    """
    rows = {int(size): spent for size, spent in clock.items()}
    calls = sum(spent["calls"] for spent in rows.values())
    requests = sum(size * spent["calls"] for size, spent in rows.items())
    execute, engine, forward = (
        sum(size * spent[name] for size, spent in rows.items()) / requests
        for name in ("execute", "engine", "forward")
    )
    return Cost(
        model,
        concurrency,
        batch=requests / calls,
        request=request,
        forward=forward,
        engine=engine - forward,
        messages=execute - engine,
    )


def table(costs: Sequence[Cost]) -> str:
    """Return the costs as a Markdown table."""
    lines = [
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'---|' * len(_COLUMNS)}",
    ]
    lines += [
        f"| {one.model} | {one.concurrency} | {one.batch:.1f} | {one.request * 1e3:.3f} |"
        f" {one.forward * 1e3:.3f} | {one.engine * 1e3:.3f} | {one.messages * 1e3:.3f} |"
        f" {one.share:.1%} |"
        for one in costs
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="mlp", choices=MODELS)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--seconds", default=5.0, type=float)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    levels = [int(level) for level in arguments.concurrency.split(",")]
    costs = [measure(arguments.model, level, arguments.seconds) for level in levels]
    print(table(costs))


if __name__ == "__main__":
    main()
