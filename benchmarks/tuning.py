"""What `torch-py-backend tune` gains over a model that nobody has tuned.

    python -m benchmarks.tuning [--models resnet18,transformer] [--output FILE]

Each model is tuned twice: within the tolerance of fp32, and with 16-bit types allowed. All
candidates of a run take turns (A B C A B C …), each is compared with eager PyTorch first, and the
gain is the throughput of the choice at its best batch over that of the eager model at its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import repositories
from benchmarks.models import MODELS

_COMMAND_LINE = "from torch_py_backend.cli import app; app()"
_TOLERANCES = {"fp32": (), "16 bits allowed": ("--reduced-precision",)}
_TARGETS = {"fp32": 1.5, "16 bits allowed": 2.5}


def tune(name: str, words: tuple[str, ...]) -> dict[str, Any]:
    """One run of the command on a fresh repository; its findings, as tuned.json holds them."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        repositories.write(name, Path(scratch))
        findings = Path(scratch) / "findings.json"
        command = ("tune", str(Path(scratch) / name), "--json", str(findings), *words)
        subprocess.run(  # noqa: S603  this interpreter
            [sys.executable, "-c", _COMMAND_LINE, *command],
            check=True,
            stdout=sys.stderr,
        )
        found: dict[str, Any] = json.loads(findings.read_text())
        return found


def main(words: list[str]) -> int:
    """Tune, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="resnet18,transformer")
    parser.add_argument("--output", type=Path, help="all findings, as JSON")
    settings = parser.parse_args(words)
    names = settings.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"unknown models {sorted(unknown)}; there are {sorted(MODELS)}")
    everything: dict[str, dict[str, Any]] = {}
    for name in names:
        everything[name] = {}
        for allowed, flags in _TOLERANCES.items():
            everything[name][allowed] = tune(name, flags)
            if settings.output:
                settings.output.write_text(json.dumps(everything, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
