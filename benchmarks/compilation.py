"""What compilation costs, and when: cold starts, warm ones, and requests of all batch sizes.

    python -m benchmarks.compilation [--model transformer] [--pairs 3] [--seconds 60]

A cold start compiles, a warm one finds the bundle of a cold one beside the model and nothing else;
an eager one shows what of a start is not compilation. A package of AOTInductor was compiled
beforehand: its start neither traces nor imports a compiler. They take turns, each with a server of
its own and an empty cache of torch's. Then requests of 1 to 8 rows come for a while, in an order
that is drawn once; what inductor writes into its cache after READY would be a compilation.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks import clients, repositories
from benchmarks.models import MAX_BATCH_SIZE, MODELS
from torch_py_backend.errors import BenchError
from torch_py_backend.server import Server
from torch_py_backend.tools.payloads import Payload

_COMPILED = 'parameters { key: "TORCH_COMPILE_OPTIONAL_PARAMETERS" value { string_value: "{}" } }\n'
_CONCURRENCY = 8
_PAYLOADS = 200
_LOAD_SECONDS = 600
_STARTS = ("eager", "package", "cold", "warm")


@dataclass(frozen=True)
class Start:
    """A server that has loaded the model, and what torch's cache held then."""

    seconds: float
    server: Server
    cache: Path

    def compiled(self) -> int:
        """How many compiled graphs torch's cache holds."""
        return sum(1 for _ in self.cache.glob("fxgraph/*/*/*"))


@contextlib.contextmanager
def started(name: str, how: str, repository: Path) -> Iterator[Start]:
    """The model of a repository: as it is, compiled anew, or with an earlier start's bundle."""
    folder = repository / name
    config = folder / "config.pbtxt"
    plain = config.read_text().replace(_COMPILED, "")
    config.write_text(plain + _COMPILED if how in {"cold", "warm"} else plain)
    if how == "cold":
        shutil.rmtree(folder / "compile_cache", ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        cache = Path(scratch) / "inductor"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        begun = time.perf_counter()
        with (
            (Path(scratch) / "server.log").open("wb") as log,
            Server(repository, http_port=0, grpc_port=0, metrics_port=0, log=log) as server,
        ):
            (state,) = server.wait_loaded(timeout=_LOAD_SECONDS)
            if not state.ready:
                raise BenchError(f"{name} was not loaded: {state.reason}")
            yield Start(time.perf_counter() - begun, server, cache)


def mixture(name: str) -> list[Payload]:
    """Requests of 1 to 8 rows, in an order that is the same each time."""
    rows = random.Random(0).choices(range(1, MAX_BATCH_SIZE + 1), k=_PAYLOADS)  # noqa: S311
    return [clients.payload(MODELS[name], count) for count in rows]


def _spread(values: list[float], digits: int) -> str:
    spread = (statistics.median(values), min(values), max(values))
    return " | ".join(f"{value:.{digits}f}" for value in spread)


def main(words: list[str]) -> int:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    settings = parser.parse_args(words)
    console = Console(stderr=True)
    seconds: dict[str, list[float]] = {how: [] for how in _STARTS}
    rows = []
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        repository, packages = Path(scratch) / "repository", Path(scratch) / "packages"
        repositories.write(settings.model, repository)
        package = repositories.write_package(settings.model, packages)
        for turn in range(settings.pairs):
            for how in _STARTS:
                packaged = how == "package"
                served, place = (package, packages) if packaged else (settings.model, repository)
                with started(served, how, place) as start:
                    seconds[how].append(start.seconds)
                    console.print(f"{how} start: {start.seconds:.1f} s")
                    if turn == settings.pairs - 1 and how != "cold":
                        before = start.compiled()
                        payloads = mixture(settings.model)
                        host = start.server.grpc_address
                        result = clients.load(
                            host, served, payloads, _CONCURRENCY, settings.seconds
                        )
                        rows.append((how, result, start.compiled() - before))
    print(f"{settings.model}: seconds from the server's start to READY\n")
    print("| start | median | min | max |\n|---|---|---|---|")
    for how, values in seconds.items():
        print(
            f"| {how} | {statistics.median(values):.1f} | {min(values):.1f} | {max(values):.1f} |"
        )
    for how in ("warm", "package"):
        ratios = [one / cold for one, cold in zip(seconds[how], seconds["cold"], strict=True)]
        print(f"| {how} ÷ cold | {_spread(ratios, 2)} |")
    print(f"\nRequests of 1 to {MAX_BATCH_SIZE} rows at concurrency {_CONCURRENCY}\n")
    print("| model | requests/s | p50 ms | p99 ms | max ms | max ÷ p50 | graphs compiled |")
    print("|---|---|---|---|---|---|---|")
    for how, result, compiled in rows:
        p50, p99, most = (value * 1e3 for value in result.percentiles(50, 99, 100))
        print(
            f"| {'compiled' if how == 'warm' else how} | {result.throughput:.0f} | {p50:.1f}"
            f" | {p99:.1f} | {most:.1f} | {most / p50:.1f} | {compiled} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
