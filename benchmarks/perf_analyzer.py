"""NVIDIA's perf_analyzer as the client, which leaves more of the cores to the server than ours.

It is in Triton's SDK images, and in the wheels of tritonclient for Linux up to 2.41.1; the latter
needs libb64.so.0d (Debian's libb64-0d) and libcudart.so.12 (nvidia-cuda-runtime-cu12 of PyPI).
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import clients
from benchmarks.clients import Endpoint
from benchmarks.harness import Connection
from benchmarks.load_generator import Point, Result, server_work
from benchmarks.models import MODELS
from torch_py_backend.errors import ToolError

# perf_analyzer reports windows that are equally fast within a limit; it measures three at least.
_WINDOWS = 3
_ANY_DIFFERENCE = 999
_REQUESTS = "requests.json"


def version(program: Path) -> str:
    """Return the version of perf_analyzer.

    Raises:
        ToolError: it does not run.
    """
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)  # noqa: S603  given by the user
    text = f"{done.stdout}{done.stderr}".strip()  # it prints to standard error
    if (found := re.search(r"Version (\S+)", text)) is None:
        raise ToolError(f"{program.name} does not print its version: {text}")
    return found[1]


async def turn(
    program: Path, endpoint: Endpoint, connection: Connection, concurrency: int, seconds: float
) -> Point:
    """Put a closed load on a model of a tritonserver.

    Args:
        program: perf_analyzer.
        endpoint: the model.
        connection: the connection to it whose statistics are read.
        concurrency: the number of outstanding requests.
        seconds: the duration, at least.

    Raises:
        ToolError: perf_analyzer failed.
    """
    _, statistics = connection
    before = await statistics() if statistics else {}
    with tempfile.TemporaryDirectory(prefix="perf-analyzer-") as folder:
        words = _options(endpoint, concurrency, seconds, Path(folder))
        began, spent = time.monotonic(), _seconds_of_children()
        process = await asyncio.create_subprocess_exec(
            program, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        busy = (_seconds_of_children() - spent) / (time.monotonic() - began)
        if process.returncode:
            last = output.decode(errors="replace").strip().rpartition("\n")[2]
            raise ToolError(f"{program.name} ended with exit code {process.returncode}: {last}")
        result = _result(Path(folder), busy)
    after = await statistics() if statistics else {}
    return Point(concurrency, result, server_work(before, after) if statistics else None)


def _options(endpoint: Endpoint, concurrency: int, seconds: float, folder: Path) -> list[str]:
    """Write the example into a folder; return the options of a load with it."""
    tensors = {
        name: {"content": tensor.array.flatten().tolist(), "shape": tensor.array.shape[1:]}
        for name, tensor in clients.payload(MODELS[endpoint.model]).items()
    }
    inputs = folder / "inputs.json"
    inputs.write_text(json.dumps({"data": [tensors]}))
    options = {
        "-m": endpoint.served,
        "-u": endpoint.host,
        "-i": endpoint.protocol,
        "--concurrency-range": concurrency,
        "--max-threads": 1,
        "--measurement-interval": round(seconds * 1000 / _WINDOWS),
        "--max-trials": _WINDOWS,
        "--stability-percentage": _ANY_DIFFERENCE,
        "--input-data": inputs,
        "--profile-export-file": folder / _REQUESTS,
    }
    return ["--async", *(str(word) for option in options.items() for word in option)]


def _seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _result(folder: Path, busy: float) -> Result:
    """Return the result of the requests that perf_analyzer listed, with times in nanoseconds."""
    (experiment,) = json.loads((folder / _REQUESTS).read_text())["experiments"]
    times = np.array(
        [
            (request["timestamp"], request["response_timestamps"][-1])
            for request in experiment["requests"]
        ]
    )
    return Result(
        seconds=float(times[:, 1].max() - times[:, 0].min()) / 1e9,
        latencies=(times[:, 1] - times[:, 0]) / 1e9,
        unanswered=np.empty(0),
        errors=0,
        first_error="",
        busy=busy,
    )
