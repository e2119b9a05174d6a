"""Starts of compiled models in processes of their own, and what they compiled."""

from __future__ import annotations

import json
import os
import re
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
from torch_py_backend.startup import builder
from torch_py_backend.config import model_config
from torch_py_backend.batching import runtime
from torch_py_backend.config import threads
from torch_py_backend.startup import warmup

tried = []  # processes that try a vector instruction
sys.addaudithook(lambda event, args: tried.append(args) if "LoadLibrary" in str(args) else None)
reports = []
for arguments in sys.argv[1:]:
    torch.manual_seed(0)
    settings = model_config.parse(json.loads(arguments))
    engine = builder.build(settings, threads.budget(settings))
    with runtime.mode(settings.options):
        warmup.run(engine)
        (outcome,) = engine.run([{"x": torch.ones(2, 4)}])
    from torch._dynamo.utils import counters
    reports.append({"y": outcome["y"].tolist(), **counters["inductor"]})
    counters.clear()
    torch._dynamo.reset()
print(json.dumps([sum(args[0] == sys.executable for args in tried), *reports]))
"""
# The compiler, with a log of what it builds.
_COMPILER = """#!/bin/sh
case "$*" in *.cpp*) echo "$*" >> "{log}";; esac
exec {compiler} "$@"
"""


def start(folders: Iterable[Path], cache: Path) -> tuple[int, int, list[dict[str, Any]]]:
    """Load and warm up models in a process with a torch cache of its own.

    Return how many models the compiler has built code for, how often a vector instruction was
    tried, and the results and counters of each model.
    """
    compiler, log = cache / "bin" / "g++", cache / "built"
    compiler.parent.mkdir(parents=True)
    log.touch()
    compiler.write_text(_COMPILER.format(log=log, compiler=shutil.which("g++")))
    compiler.chmod(0o755)
    words = []
    for folder in folders:
        options = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": "{}", "WEIGHTS": "none"}
        options |= {"OPTIMIZE": "freeze"} if folder.name == "frozen" else {}
        arguments = build.arguments(
            max_batch_size=2,
            output=[{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}],
            parameters={key: {"string_value": value} for key, value in options.items()},
        )
        words.append(json.dumps(arguments | {"model_repository": str(folder)}))
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # slower for a few kernels
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
    tried, *reports = json.loads(result.stdout.splitlines()[-1])
    # Without what inductor builds to examine the processor.
    built = set(re.findall(rf"/{build.MODEL}-[0-9a-f]+/", log.read_text()))
    return len(built), tried, reports
