"""Measure the gain of `torch-py-backend tune` over an untuned model.

    python -m benchmarks.tuning [--models resnet18,transformer] [--for both] [--fp32]
        [--output FILE]

Each model is tuned twice: within the tolerance of fp32, and with 16-bit types allowed; with --fp32,
once, for processors that compute no 16-bit types. The gains are the throughput of the choice with
full batches, and the latency of one request in flight, beside those of the configured model (eager,
one instance, all cores).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import repositories
from benchmarks.models import MODELS
from benchmarks.tables import markdown

_COMMAND_LINE = "from torch_py_backend.cli import app; app()"
_TOLERANCES = {"fp32": (), "16 bits allowed": ("--reduced-precision",)}
_COLUMNS = (
    "model", "allowed", "as configured, rows/s", "chosen", "rows/s", "gain", "latency gain", "±",
    "max error",
)  # fmt: skip
_TARGETS = {"fp32": 1.5, "16 bits allowed": 2.5}


def tune(name: str, words: tuple[str, ...]) -> dict[str, Any]:
    """Run the command on a new repository; return its results as in tuned.json."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        repositories.write(name, Path(scratch))
        path = Path(scratch) / "results.json"
        command = ("tune", str(Path(scratch) / name), "--json", str(path), *words)
        subprocess.run(  # noqa: S603  this interpreter
            [sys.executable, "-c", _COMMAND_LINE, *command],
            check=True,
            stdout=sys.stderr,
        )
        results: dict[str, Any] = json.loads(path.read_text())
        return results


def main(words: list[str]) -> int:
    """Tune, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="resnet18,transformer")
    parser.add_argument("--for", dest="goal", default="both", help="as for torch-py-backend tune")
    parser.add_argument("--fp32", action="store_true", help="no 16-bit types")
    parser.add_argument("--output", type=Path, help="all results, as JSON")
    settings = parser.parse_args(words)
    names = settings.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"unknown models {sorted(unknown)}; there are {sorted(MODELS)}")
    by_model: dict[str, dict[str, Any]] = {}
    for name in names:
        by_model[name] = {}
        for allowed, flags in list(_TOLERANCES.items())[: 1 if settings.fp32 else None]:
            by_model[name][allowed] = tune(name, ("--for", settings.goal, *flags))
            if settings.output:
                settings.output.write_text(json.dumps(by_model, indent=1))
    print(table(by_model))
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
