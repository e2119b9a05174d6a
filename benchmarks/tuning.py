"""Measure the gain of `torch-py-backend tune` over an untuned model.

    python -m benchmarks.tuning [--models resnet18,transformer] [--for both] [--fp32]
        [--served SECONDS] [--output FILE]

Each model is tuned twice: within the tolerance of fp32, and with 16-bit types allowed; with --fp32,
once, for processors that compute no 16-bit types. The gains are the throughput of the choice with
full batches, and the latency of one request in flight, beside those of the configured model (eager,
one instance, all cores). With --served, a tritonserver then serves both, after their responses were
compared with eager PyTorch, and each is loaded in turn for that many seconds, A B A B …
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import clients, harness, repositories
from benchmarks.clients import Endpoint
from benchmarks.contenders import check
from benchmarks.models import MODELS
from benchmarks.tables import markdown

_COMMAND_LINE = "from torch_py_backend.cli import app; app()"
_TOLERANCES = {"fp32": (), "16 bits allowed": ("--reduced-precision",)}
_COLUMNS = (
    "model", "allowed", "as configured, rows/s", "chosen", "rows/s", "gain", "latency gain", "±",
    "max error",
)  # fmt: skip
_TARGETS = {"fp32": 1.5, "16 bits allowed": 2.5}
_SERVED_COLUMNS = (
    "model", "allowed", "in flight", "tuned ÷ configured", "tuned, /s", "configured, /s",
    "tuned, p50/p99 ms", "configured, p50/p99 ms",
)  # fmt: skip
_CONCURRENCY = (1, 8)
_PAIRS = 3


def tune(name: str, words: tuple[str, ...], repository: Path) -> dict[str, Any]:
    """Write a model and tune it; return the command's results as in tuned.json."""
    repositories.write(name, repository)
    shutil.copytree(repository / name, repository / _configured(name))
    path = repository.parent / "results.json"
    command = ("tune", str(repository / name), "--json", str(path), *words)
    subprocess.run(  # noqa: S603  this interpreter
        [sys.executable, "-c", _COMMAND_LINE, *command],
        check=True,
        stdout=sys.stderr,
    )
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def _configured(name: str) -> str:
    return f"{name}_configured"


def serve(name: str, allowed: str, repository: Path, seconds: float) -> Iterator[tuple[str, ...]]:
    """Serve the tuned model beside the configured one; yield rows with _SERVED_COLUMNS.

    Raises:
        ToolError: a model did not load, a response is wrong, or a request failed.
    """
    payloads = [clients.payload(MODELS[name])]
    with harness.served(repository) as server:
        address = server.grpc_address
        if allowed == "fp32":  # 16-bit types are outside the tolerance of `check`
            check(Endpoint(name, "grpc", address, name))
        for concurrency in _CONCURRENCY:
            pairs = [
                tuple(
                    harness.load(address, served, payloads, concurrency, seconds)
                    for served in (name, _configured(name))
                )
                for _ in range(_PAIRS + 1)
            ][1:]  # the first one warms up
            ratios = sorted(
                tuned.result.throughput / configured.result.throughput
                for tuned, configured in pairs
            )
            sides = list(zip(*pairs, strict=True))
            rates = [statistics.median(turn.result.throughput for turn in side) for side in sides]
            latencies = [
                "/".join(
                    f"{statistics.median(harness.latency_ms(turn, share) for turn in side):.1f}"
                    for share in (50, 99)
                )
                for side in sides
            ]
            yield (
                name,
                allowed,
                str(concurrency),
                f"**{statistics.median(ratios):.2f}** ({ratios[0]:.2f}..{ratios[-1]:.2f})",
                *(f"{rate:.0f}" for rate in rates),
                *latencies,
            )


def main(words: list[str]) -> int:
    """Tune, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="resnet18,transformer")
    parser.add_argument("--for", dest="goal", default="both", help="as for torch-py-backend tune")
    parser.add_argument("--fp32", action="store_true", help="no 16-bit types")
    parser.add_argument("--served", type=float, help="seconds of each turn on a tritonserver")
    parser.add_argument("--output", type=Path, help="all results of the command, as JSON")
    settings = parser.parse_args(words)
    names = settings.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"unknown models {sorted(unknown)}; there are {sorted(MODELS)}")
    by_model: dict[str, dict[str, Any]] = {}
    served: list[tuple[str, ...]] = []
    for name in names:
        by_model[name] = {}
        for allowed, flags in list(_TOLERANCES.items())[: 1 if settings.fp32 else None]:
            with harness.scratch() as scratch:
                repository = Path(scratch) / "repository"
                by_model[name][allowed] = tune(name, ("--for", settings.goal, *flags), repository)
                if settings.output:
                    settings.output.write_text(json.dumps(by_model, indent=1))
                if settings.served:
                    served += serve(name, allowed, repository, settings.served)
    print(table(by_model))
    if served:
        print(f"\n{markdown(_SERVED_COLUMNS, served)}")
    return 0


def table(by_model: Mapping[str, Mapping[str, Any]]) -> str:
    """Return Markdown tables of the configured model, the choice and the gain."""
    rows = []
    gains: dict[str, list[float]] = {allowed: [] for allowed in _TOLERANCES}
    for name, runs in by_model.items():
        for allowed, results in runs.items():
            plain, best = results["rows"][0], _chosen(results)
            gains[allowed].append(best["throughput_gain"])
            candidate = best["candidate"]
            threads = candidate["parameters"].get("NUM_THREADS", "all")
            rows.append(
                (
                    name,
                    allowed,
                    f"{plain['throughput']:.0f}",
                    f"{candidate['title']}, {threads} threads x {candidate['instances']}",
                    f"{best['throughput']:.0f}",
                    f"**{gains[allowed][-1]:.2f}**",
                    f"**{best['latency_gain']:.2f}**",
                    f"{max(best['throughput_spread'], best['latency_spread']):.0%}",
                    f"{best['error']:.0e}",
                )
            )
    means = [
        (allowed, f"**{statistics.geometric_mean(values):.2f}**", _TARGETS[allowed])
        for allowed, values in gains.items()
        if values
    ]
    columns = ("allowed", "geometric mean of the gains", "target")
    return f"{markdown(_COLUMNS, rows)}\n\n{markdown(columns, means)}"


def _chosen(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of the choice, which is that of the configured model if nothing is faster."""
    chosen = results["chosen"]
    row: dict[str, Any] = next(
        row
        for row in results["rows"]
        if row["candidate"]["parameters"] == chosen["parameters"]
        and row["candidate"]["instances"] == chosen["instances"]
    )
    return row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
