"""What our backend costs around the model's forward: reading, gathering, binding, scattering.

    python -m benchmarks.forward [--model mlp] [--concurrency 1,8,32] [--seconds 5]

The instance itself keeps two clocks, around `execute` and around `forward` (`served/clock.py`);
Triton's statistics tell how long whole requests took, their wait in the queue included.
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
from torch_py_backend import load
from torch_py_backend.errors import BenchError
from torch_py_backend.load import Closed
from torch_py_backend.server import Server

_LOAD_SECONDS = 120


@dataclass(frozen=True)
class Cost:
    """Where the time of a request went, in seconds; means over requests.

    Attributes:
        batch: mean requests in a call.
        request: Triton's whole time for a request.
        forward: bare forward of the batch that the request was in.
        around: what our `execute` took beside that.
    """

    model: str
    concurrency: int
    batch: float
    request: float
    forward: float
    around: float

    @property
    def share(self) -> float:
        """What we take of a whole request."""
        return self.around / self.request


def measure(model: str, concurrency: int, seconds: float) -> Cost:
    """Serve a model on the clock and load it.

    Raises:
        BenchError: it is not served, or a request failed.
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
    """Triton's mean time for a request, in seconds."""
    async with clients.connected(endpoint) as (send, statistics):
        assert statistics is not None  # noqa: S101  it is a tritonserver
        result = await load.run(send, Closed(concurrency), seconds)
        if result.errors or not result.latencies.size:
            raise BenchError(f"{result.errors} requests failed: {result.first_error}")
        return _mean_request(await statistics())


def _mean_request(document: Mapping[str, Any]) -> float:
    done = document["model_stats"][0]["inference_stats"]["success"]
    return int(done["ns"]) / int(done["count"]) / 1e9


def cost(
    model: str, concurrency: int, clock: Mapping[str, Sequence[float]], request: float
) -> Cost:
    """What the clocks say, by request: each one of a batch waits for the whole batch.

    Args:
        model: the model's name.
        concurrency: the requests outstanding.
        clock: by requests in a call: calls, seconds in `execute`, seconds in `forward`.
        request: Triton's mean time for a request, in seconds.
    """
    rows = {int(size): spent for size, spent in clock.items()}
    requests = sum(size * calls for size, (calls, _, _) in rows.items())
    calls = sum(calls for calls, _, _ in rows.values())
    executed = sum(size * seconds for size, (_, seconds, _) in rows.items()) / requests
    forward = sum(size * seconds for size, (_, _, seconds) in rows.items()) / requests
    return Cost(model, concurrency, requests / calls, request, forward, executed - forward)


def table(costs: Sequence[Cost]) -> str:
    """As Markdown."""
    lines = [
        "| model | concurrency | batch | request, ms | forward, ms | around it, ms | share |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.model} | {one.concurrency} | {one.batch:.1f} | {one.request * 1e3:.3f} |"
        f" {one.forward * 1e3:.3f} | {one.around * 1e3:.3f} | {one.share:.1%} |"
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
