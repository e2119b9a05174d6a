"""How long starts of a compiled model take: cold, warm, and warm after its folder was copied.

    python -m benchmarks.compilation [--models resnet18,transformer] [--rows 32] [--rounds 3]

Each start is a server of its own, from its start to READY, with an empty temporary folder. An eager
start has no compilation.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmarks import harness, repositories
from benchmarks.models import MAX_BATCH_SIZE, MODELS
from benchmarks.tables import markdown, spread

_WAYS = {
    "torch.compile": 'key: "TORCH_COMPILE_OPTIONAL_PARAMETERS" value { string_value: "{}" }',
    "aoti": 'key: "OPTIMIZE" value { string_value: "aoti" }',
}


def ready(repository: Path) -> float:
    """Return the seconds from a server's start to READY."""
    with harness.scratch() as scratch:
        os.environ["TMPDIR"] = scratch
        start = time.perf_counter()
        try:
            with harness.served(repository):
                return time.perf_counter() - start
        finally:
            del os.environ["TMPDIR"]


def starts(name: str, rows: int) -> dict[str, float]:
    """Return the seconds of one start of each kind."""
    with harness.scratch() as scratch:
        first = Path(scratch, "a")
        repositories.write(name, first)
        config = first / name / "config.pbtxt"
        largest = f"max_batch_size: {rows}"
        eager = config.read_text().replace(f"max_batch_size: {MAX_BATCH_SIZE}", largest)
        config.write_text(eager)
        seconds = {"eager": ready(first)}
        for way, option in _WAYS.items():
            config.write_text(f"{eager}parameters {{ {option} }}\n")
            seconds |= {f"{way}, cold": ready(first), f"{way}, warm": ready(first)}
            copied = Path(scratch, way)
            shutil.copytree(first, copied)
            seconds[f"{way}, copied"] = ready(copied)
        return seconds


def main(words: list[str]) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="resnet18,transformer")
    parser.add_argument("--rows", type=int, default=32, help="max_batch_size")
    parser.add_argument("--rounds", type=int, default=3)
    settings = parser.parse_args(words)
    names = settings.models.split(",")
    if unknown := set(names) - MODELS.keys():
        parser.error(f"--models has {', '.join(unknown)}; expected some of {', '.join(MODELS)}")
    console = Console(stderr=True)
    table = []
    for name in names:
        rounds = []
        for _ in range(settings.rounds):
            rounds.append(starts(name, settings.rows))
            console.print(name, rounds[-1])
        for kind in rounds[0]:
            values = spread([seconds[kind] for seconds in rounds])
            table.append((name, kind, *(f"{value:.1f}" for value in values)))
    print(markdown(("model", "start", "median s", "min", "max"), table))


if __name__ == "__main__":
    main(sys.argv[1:])
