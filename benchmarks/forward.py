"""Measure the time that our backend takes around the model's forward().

    python -m benchmarks.forward [--model mlp] [--concurrency 1,8,32] [--seconds 5]

The instance measures the times (`served/clock.py`). The time of a whole request, including its wait
in the queue, comes from Triton's statistics.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tritonclient.grpc

from benchmarks import clients, harness, repositories
from benchmarks.clients import Endpoint
from benchmarks.contenders import check
from benchmarks.models import MODELS
from torch_py_backend.tools.report import markdown

COLUMNS = (
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
    with harness.scratch() as scratch:
        repository, clock = Path(scratch) / "repository", Path(scratch) / "clock.json"
        repositories.write_clocked(model, repository, clock)
        with harness.served(repository) as server:
            check(Endpoint(model, "grpc", server.grpc_address, model, counts=True))
            payloads = [clients.payload(MODELS[model])]
            harness.load(server.grpc_address, model, payloads, concurrency, seconds)
            with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
                statistics = client.get_inference_statistics(model, as_json=True)
        success = statistics["model_stats"][0]["inference_stats"]["success"]
        request = int(success["ns"]) / int(success["count"]) / 1e9
        return cost(model, concurrency, json.loads(clock.read_text()), request)


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
    times = {int(size): spent for size, spent in clock.items()}
    calls = sum(spent["calls"] for spent in times.values())
    requests = sum(size * spent["calls"] for size, spent in times.items())
    execute, engine, forward = (
        sum(size * spent[name] for size, spent in times.items()) / requests
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


def rows(costs: Sequence[Cost]) -> list[tuple[str, ...]]:
    """Return the rows of a table with COLUMNS."""
    return [
        (
            cost.model,
            str(cost.concurrency),
            f"{cost.batch:.1f}",
            *(f"{value * 1e3:.3f}" for value in (cost.request, cost.forward, cost.engine)),
            f"{cost.messages * 1e3:.3f}",
            f"{cost.share:.1%}",
        )
        for cost in costs
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="mlp", choices=MODELS)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--seconds", default=5.0, type=float)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    levels = [int(level) for level in arguments.concurrency.split(",")]
    costs = [measure(arguments.model, level, arguments.seconds) for level in levels]
    print(markdown(COLUMNS, rows(costs)))


if __name__ == "__main__":
    main()
