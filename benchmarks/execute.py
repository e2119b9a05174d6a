"""Measure the time of execute() in a real stub: by both paths, with features, and by hand.

    python -m benchmarks.execute [--models add,mlp] [--seconds 2] [--turns 5] [--output FILE]

All are loaded in turn by one client, A B C A B C …, alone and with 32 requests outstanding.
Calls are compared that answer equally many requests. The first table has CPU times, by the clocks
in `served/clock.py`; the second wall times of the steps of the fast path, by `served/steps.py`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
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
PATHS = ("by hand", "fast", "general", *repositories.FEATURES)
_STEPS = "steps"
# What the fast path does between two readings of the clock.
STEPS = (
    "instance status, choice of the path",
    "read and concatenate inputs",
    "to forward()",
    "forward()",
    "check the result",
    "split and write outputs",
    "counts, instance status",
)
_CONCURRENCY = (1, 32)
# Fewer calls of a size are not reported.
_LEAST_CALLS = 200

# The nanoseconds of each call, by path and requests in the call: execute() and forward(); on the
# path `steps`, those of each step.
Times: TypeAlias = dict[str, dict[int, list[list[int]]]]


def measure(model: str, seconds: float, turns: int) -> Times:
    """Serve a model once for each row of the tables, and put load on each in turn.

    Raises:
        ToolError: a model did not load, a response is wrong, or a request failed.
    """
    with harness.scratch() as scratch:
        folder = Path(scratch)
        served = {
            path: repositories.write_clocked(model, folder / "repository", path, folder)
            for path in (*PATHS, _STEPS)
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
                int(size): calls
                for size, calls in json.loads((folder / f"{name}.json").read_text()).items()
            }
            for path, name in served.items()
        }


def rows(model: str, times: Times) -> list[tuple[str, ...]]:
    """Return the rows of a table with COLUMNS: medians over the calls of one size."""
    table = []
    for size in _sizes(times, PATHS):
        by_hand = _median(times["by hand"][size])[0]
        for path in PATHS:
            whole, forward = _median(times[path][size])
            table.append(
                (
                    model,
                    str(size),
                    path,
                    f"{len(times[path][size]):,}",
                    *_texts((whole, forward, whole - forward)),
                    f"{whole / by_hand:.2f}",
                )
            )
    return table


def steps(times: Mapping[str, Times]) -> str:
    """Return a table of the steps of the fast path: medians for the fewest and most requests.

    Args:
        times: the times by model.
    """
    columns, sums = [], []
    for model, paths in times.items():
        sizes = _sizes(paths, (_STEPS,))
        for size in sorted({*sizes[:1], *sizes[-1:]}):
            medians = _median(paths[_STEPS][size])
            columns.append((f"{model}, {size} request{'s' * (size > 1)}", medians))
            sums.append(sum(medians))
    cells = zip(*[medians for _, medians in columns], strict=True)
    return markdown(
        ("step, µs", *(title for title, _ in columns)),
        [
            *((step, *_texts(values)) for step, values in zip(STEPS, cells, strict=True)),
            ("execute()", *_texts(sums)),
        ],
    )


def _texts(values: Iterable[float]) -> list[str]:
    return [f"{value:.0f}" for value in values]


def _sizes(times: Times, paths: Sequence[str]) -> list[int]:
    """Return the numbers of requests that calls of all these paths answered often enough."""
    return [
        size
        for size in sorted(times[paths[0]])
        if all(len(times[path].get(size, ())) >= _LEAST_CALLS for path in paths)
    ]


def _median(calls: Sequence[Sequence[int]]) -> list[float]:
    """Return the median of each column in microseconds."""
    medians: list[float] = (np.median(np.array(calls), axis=0) / 1e3).tolist()
    return medians


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="add,mlp")
    parser.add_argument("--seconds", default=2.0, type=float)
    parser.add_argument("--turns", default=5, type=int)
    parser.add_argument("--output", type=Path, help="a document with the marks of this table")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    times = {
        model: measure(model, arguments.seconds, arguments.turns)
        for model in arguments.models.split(",")
    }
    paths = [row for model, measured in times.items() for row in rows(model, measured)]
    tables = f"{markdown(COLUMNS, paths)}\n\n{steps(times)}"
    print(tables)
    if arguments.output is not None:
        harness.write_table(arguments.output, "execute", tables)


if __name__ == "__main__":
    main()
