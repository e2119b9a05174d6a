"""Starts of compiled models in processes of their own, and what they compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import build

_START = """
import json, sys
import torch
from torch_py_backend.engine import load
from torch_py_backend.config import model_config
from torch_py_backend.engine import runtime
from torch_py_backend.config import threads
from torch_py_backend.engine import warmup

reports = []
for arguments in sys.argv[1:]:
    torch.manual_seed(0)
    settings = model_config.parse(json.loads(arguments))
    engine = load.build(settings, threads.budget(settings))
    with runtime.mode(settings.options):
        warmup.run(engine)
        (outcome,) = engine.run([{"x": torch.ones(2, 4)}])
    from torch._dynamo.utils import counters
    report = {"y": outcome["y"].tolist(), "cache": engine.counts.compile_cache}
    reports.append(report | counters["inductor"])
    counters.clear()
    torch._dynamo.reset()
print(json.dumps(reports))
"""
# The compiler, with a log of what it builds.
_COMPILER = """#!/bin/sh
case "$1" in --version|-v) ;; *) echo "$*" >> "{log}";; esac
exec {compiler} "$@"
"""


def start(folders: Iterable[Path], scratch: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Load and warm up models in a process with a temporary folder of its own.

    Return the arguments of the compiler's calls, and the results and counters of each model.
    """
    compiler, log = scratch / "bin" / "g++", scratch / "built"
    compiler.parent.mkdir(parents=True)
    log.touch()
    compiler.write_text(_COMPILER.format(log=log, compiler=shutil.which("g++")))
    compiler.chmod(0o755)
    words = []
    for folder in folders:
        parameters = {"options": {"freezing": True}} if folder.name == "frozen" else {}
        options = {
            "TORCH_COMPILE_OPTIONAL_PARAMETERS": json.dumps(parameters),
            "WEIGHTS": "none",
        }
        arguments = build.arguments(
            max_batch_size=2,
            output=[{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}],
            parameters={key: {"string_value": value} for key, value in options.items()},
        )
        words.append(json.dumps(arguments | {"model_repository": str(folder)}))
    environment = {
        "TMPDIR": str(scratch),
        "PATH": f"{compiler.parent}{os.pathsep}{os.environ['PATH']}",
    }
    result = subprocess.run(
        [sys.executable, "-c", _START, *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return log.read_text().splitlines(), json.loads(result.stdout.splitlines()[-1])
