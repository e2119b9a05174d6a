"""Measure a model's calls with all cores, alone and beside a busy process.

    python -m benchmarks.contention [--model transformer] [--turns 3] [--seconds 3]

Threads of OpenMP wait for each other as they do by default, and as they do in an instance
(`threads.limit_spinning`). Each turn is a process of its own, A B A B …
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.models import MAX_BATCH_SIZE, MODELS
from benchmarks.tables import markdown
from torch_py_backend.config import threads

_BUSY = "while True: pass"
_COLUMNS = ("machine", "waiting", "p50, ms", "p90, ms", "p50 ÷ default")


def call(model: str, seconds: float) -> list[float]:
    """Return the durations of calls with a full batch, in seconds."""
    torch.set_num_threads(threads.available_cores())
    module = MODELS[model].build()
    batch = [torch.stack([tensor] * MAX_BATCH_SIZE) for tensor in MODELS[model].example()]
    durations = []
    with torch.inference_mode():
        module(*batch)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            module(*batch)
            durations.append(time.perf_counter() - start)
    return durations


def turn(model: str, seconds: float, variables: dict[str, str]) -> tuple[float, float]:
    """Return median and 90th percentile of one process's calls, in milliseconds."""
    command = [sys.executable, "-m", "benchmarks.contention", "--model", model, "--call"]
    done = subprocess.run(  # noqa: S603  this program
        [*command, "--seconds", str(seconds)],
        env=os.environ | variables,
        check=True,
        stdout=subprocess.PIPE,
    )
    durations = json.loads(done.stdout)
    return statistics.median(durations) * 1e3, statistics.quantiles(durations, n=10)[-1] * 1e3


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep cores busy with other processes."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]  # noqa: S603
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--call", action="store_true", help="run one turn in this process")
    settings = parser.parse_args()
    if settings.call:
        print(json.dumps(call(settings.model, settings.seconds)))
        return
    before = dict(os.environ)
    threads.limit_spinning()
    waits = {"default": {}, "of an instance": {**os.environ}}
    os.environ.clear()
    os.environ.update(before)
    rows = []
    for machine, count in (("alone", 0), ("beside a busy process", 1)):
        figures: dict[str, list[tuple[float, float]]] = {wait: [] for wait in waits}
        with busy(count):
            for _ in range(settings.turns):
                for wait, variables in waits.items():
                    figures[wait].append(turn(settings.model, settings.seconds, variables))
        for wait, turns in figures.items():
            pairs = zip(turns, figures["default"], strict=True)
            ratios = sorted(own[0] / default[0] for own, default in pairs)
            p50, p90 = (statistics.median(column) for column in zip(*turns, strict=True))
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})"
            rows.append((machine, wait, f"{p50:.0f}", f"{p90:.0f}", spread))
    print(markdown(_COLUMNS, rows))


if __name__ == "__main__":
    main()
