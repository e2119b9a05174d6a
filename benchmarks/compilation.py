"""What compilation costs, and when: cold starts, warm ones, and requests of all batch sizes.

    python -m benchmarks.compilation [--model transformer] [--pairs 3] [--seconds 60]

A cold start compiles. A warm start has the bundle of a cold start beside the model, and an imported
start has it from `export-compiled` and `import-compiled`. An eager start has no compilation. A
package of AOTInductor is compiled beforehand: its start neither traces nor imports a compiler. The
starts take turns, each with its own server and an empty cache of torch's. Then requests of 1 to 8
rows are sent in random order; what inductor writes into its cache after READY is a compilation.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks import clients, harness, repositories
from benchmarks.models import MAX_BATCH_SIZE, MODELS
from benchmarks.payloads import Payload
from benchmarks.tables import markdown, spread
from torch_py_backend.server import Server

_COMPILED = 'parameters { key: "TORCH_COMPILE_OPTIONAL_PARAMETERS" value { string_value: "{}" } }\n'
_CONCURRENCY = 8
_PAYLOADS = 200
_COLUMNS = ("model", "requests/s", "p50 ms", "p99 ms", "max ms", "max ÷ p50", "graphs compiled")
_STARTS = ("eager", "package", "cold", "warm", "imported")
_COMMAND = "from torch_py_backend.cli import app; app()"


@dataclass(frozen=True)
class Start:
    """A server that has loaded the model, and torch's cache of that time."""

    seconds: float
    server: Server
    cache: Path

    def compiled(self) -> int:
        """Return how many compiled graphs torch's cache holds."""
        return sum(1 for _ in self.cache.glob("fxgraph/*/*/*"))


@contextlib.contextmanager
def started(name: str, how: str, repository: Path) -> Iterator[Start]:
    """Start the model of a repository: as it is, compiled anew, or with an earlier bundle."""
    config = repository / name / "config.pbtxt"
    plain = config.read_text().replace(_COMPILED, "")
    config.write_text(plain + _COMPILED if how in {"cold", "warm", "imported"} else plain)
    if how == "imported":
        with harness.scratch() as folder:
            export = f"{folder}/export"
            _run("export-compiled", str(repository), export)
            shutil.rmtree(repository / name / "compile_cache")
            _run("import-compiled", export, str(repository))
    if how == "cold":
        shutil.rmtree(repository / name / "compile_cache", ignore_errors=True)
    with harness.scratch() as folder:
        cache = Path(folder) / "inductor"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        start = time.perf_counter()
        with harness.served(repository) as server:
            yield Start(time.perf_counter() - start, server, cache)


def _run(*arguments: str) -> None:
    """Run a command of ours."""
    subprocess.run([sys.executable, "-c", _COMMAND, *arguments], check=True)  # noqa: S603


def mixture(name: str) -> list[Payload]:
    """Return requests of 1 to 8 rows, in the same order each time."""
    rows = random.Random(0).choices(range(1, MAX_BATCH_SIZE + 1), k=_PAYLOADS)  # noqa: S311
    return [clients.payload(MODELS[name], count) for count in rows]


def main(words: list[str]) -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    settings = parser.parse_args(words)
    console = Console(stderr=True)
    seconds: dict[str, list[float]] = {how: [] for how in _STARTS}
    loads = []
    with harness.scratch() as scratch:
        repository, packages = Path(scratch) / "repository", Path(scratch) / "packages"
        repositories.write(settings.model, repository)
        package = repositories.write_package(settings.model, packages)
        for turn in range(settings.pairs):
            for how in _STARTS:
                served, place = settings.model, repository
                if how == "package":
                    served, place = package, packages
                with started(served, how, place) as start:
                    seconds[how].append(start.seconds)
                    console.print(f"{how} start: {start.seconds:.1f} s")
                    if turn == settings.pairs - 1 and how not in {"cold", "imported"}:
                        loads.append(_load(how, start, served, settings))
    print(f"{settings.model}: seconds from the server's start to READY\n")
    starts = [(how, *spread(values)) for how, values in seconds.items()]
    starts += [
        (
            f"{how} ÷ cold",
            *spread([a / b for a, b in zip(seconds[how], seconds["cold"], strict=True)]),
        )
        for how in ("warm", "imported", "package")
    ]
    figures = [(how, *(f"{value:.2f}" for value in values)) for how, *values in starts]
    print(markdown(("start", "median", "min", "max"), figures))
    print(f"\nRequests of 1 to {MAX_BATCH_SIZE} rows at concurrency {_CONCURRENCY}\n")
    print(markdown(_COLUMNS, loads))


def _load(
    how: str, start: Start, served: str, settings: argparse.Namespace
) -> tuple[str | int, ...]:
    """Send requests of all sizes; return a row of the second table."""
    before = start.compiled()
    result = harness.load(
        start.server.grpc_address, served, mixture(settings.model), _CONCURRENCY, settings.seconds
    ).result
    p50, p99, most = (value * 1e3 for value in result.percentiles(50, 99, 100))
    return (
        "compiled" if how == "warm" else how,
        f"{result.throughput:.0f}",
        *(f"{value:.1f}" for value in (p50, p99, most, most / p50)),
        start.compiled() - before,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
