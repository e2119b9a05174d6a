"""Measure the CPU time of execute() in a real stub: ours by both of its paths, and one by hand.

    python -m benchmarks.execute [--models add,mlp] [--seconds 2] [--turns 5] [--output FILE]

The three are loaded in turn by one client, A B C A B C …, alone and with 32 requests outstanding.
Calls are compared that answer equally many requests. `served/clock.py` has the clocks.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from benchmarks import clients, harness, repositories
from benchmarks.clients import Endpoint
from benchmarks.contenders import check
from benchmarks.models import MODELS
from benchmarks.tables import markdown

COLUMNS = (
    "model", "requests in a call", "path", "calls",
    "execute(), µs", "forward(), µs", "around it, µs", "÷ by hand",
)  # fmt: skip
PATHS = ("fast", "general", "by hand")
_CONCURRENCY = (1, 32)
# Fewer calls of a size are not reported.
_LEAST_CALLS = 200

# The nanoseconds of execute() and forward() in each call, by path and requests in the call.
Times: TypeAlias = dict[str, dict[int, list[tuple[int, int]]]]


def measure(model: str, seconds: float, turns: int) -> Times:
    """Serve a model three times, and put load on each in turn.

    Raises:
        BenchError: a model did not load, a response is wrong, or a request failed.
    """
    with harness.scratch() as scratch:
        folder = Path(scratch)
        served = {
            path: repositories.write_clocked(model, folder / "repository", path, folder)
            for path in PATHS
        }
        with harness.served(folder / "repository") as server:
            payloads = [clients.payload(MODELS[model])]
            for name in served.values():
                check(Endpoint(model, "grpc", server.grpc_address, name))
            for _ in range(turns):
                for concurrency in _CONCURRENCY:
                    for name in served.values():
                        harness.load(server.grpc_address, name, payloads, concurrency, seconds)
        return {
            path: {
                int(size): [(whole, forward) for whole, forward in calls]
                for size, calls in json.loads((folder / f"{name}.json").read_text()).items()
            }
            for path, name in served.items()
        }


def rows(model: str, times: Times) -> list[tuple[str, ...]]:
    """Return the rows of a table with COLUMNS: medians over the calls of one size."""
    sizes = [
        size
        for size in sorted(times["by hand"])
        if all(len(times[path].get(size, ())) >= _LEAST_CALLS for path in PATHS)
    ]
    table = []
    for size in sizes:
        by_hand = _median(times["by hand"][size])[0]
        for path in PATHS:
            whole, forward = _median(times[path][size])
            table.append(
                (
                    model,
                    str(size),
                    path,
                    f"{len(times[path][size]):,}",
                    *(f"{value:.0f}" for value in (whole, forward, whole - forward)),
                    f"{whole / by_hand:.2f}",
                )
            )
    return table


def _median(calls: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the medians of execute() and forward() in microseconds."""
    whole, forward = np.median(np.array(calls), axis=0) / 1e3
    return float(whole), float(forward)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="add,mlp")
    parser.add_argument("--seconds", default=2.0, type=float)
    parser.add_argument("--turns", default=5, type=int)
    parser.add_argument("--output", type=Path, help="a document with the marks of this table")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    table = markdown(
        COLUMNS,
        [
            row
            for model in arguments.models.split(",")
            for row in rows(model, measure(model, arguments.seconds, arguments.turns))
        ],
    )
    print(table)
    if arguments.output is not None:
        harness.write_table(arguments.output, "execute", table)


if __name__ == "__main__":
    main()
