"""What the comparisons share: a server with a repository, loads in turn.

The speed of a machine drifts by tens of percent within minutes, but hardly between two consecutive
turns. So servers are compared within pairs of turns, A B A B …
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from benchmarks import load_client, load_generator
from benchmarks.load_client import Address
from benchmarks.load_generator import Point, ReadStatistics, Send
from benchmarks.payloads import Payload
from torch_py_backend.errors import ToolError
from torch_py_backend.server import Server

_SERVE = "from torch_py_backend.cli import app; app()"
_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--health-port=0")
_SERVING = re.compile(r"serving on \S+ and grpc://(\S+);.* readiness on http://(\S+)/ready")
Pair: TypeAlias = tuple[Point, Point]
"""A turn of our server and the following turn of the other one."""
Connection: TypeAlias = tuple[Send, ReadStatistics | None]
Turn: TypeAlias = Callable[[], Awaitable[Point]]
"""Puts a load on one of two servers."""


@contextlib.contextmanager
def served(repository: Path, *arguments: str) -> Iterator[Server]:
    """Start a tritonserver with all models of a repository; its log lies beside the repository.

    Args:
        repository: the model repository.
        arguments: more arguments for tritonserver.

    Raises:
        ToolError: a model was not loaded.
    """
    arguments = ("--exit-on-error=false", *arguments)
    with Server(repository, arguments=arguments, log=repository.parent / "server.log") as server:
        for name, state in server.wait_loaded().items():
            if not state.ready:
                raise ToolError(f"{name} was not loaded: {state.reason}")
        yield server


@contextlib.contextmanager
def supervised(
    repository: Path, *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run `torch-py-backend serve` on a repository until all models have been loaded.

    Yields its process, and the host and port of gRPC and of the page.
    """
    command = [sys.executable, "-c", _SERVE, "serve", str(repository), *_PORTS, *arguments]
    process = subprocess.Popen(  # noqa: S603  this Python, this package
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None  # noqa: S101  it is a pipe
        match = None
        while match is None:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the server did not start")
            match = _SERVING.search(line)
        # Its further output is discarded, so that it does not wait for a reader.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield process, match[1], match[2]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder."""
    return tempfile.TemporaryDirectory(prefix="benchmarks-")


def write_model(folder: Path, config: str, files: Mapping[str, str]) -> Path:
    """Write a model's folder; return its version folder."""
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    for name, text in files.items():
        (version / name).write_text(text)
    return version


async def turn(connection: Connection, concurrency: int, seconds: float) -> Point:
    """Put a closed load on a model.

    Raises:
        ToolError: a request failed or was not answered.
    """
    send, statistics = connection
    point = await load_generator.measure(send, concurrency, seconds, statistics=statistics)
    assert point is not None  # noqa: S101  nothing stops it
    if point.result.errors or point.result.unanswered.size:
        raise ToolError(
            f"{point.result.errors} requests failed and {point.result.unanswered.size} had no"
            f" answer: {point.result.first_error or 'no error was reported'}"
        )
    return point


async def in_turn(turns: Sequence[Turn], pairs: int) -> AsyncIterator[Pair]:
    """Yield pairs as they are measured, after one turn to warm up each of two servers."""
    ours, other = turns
    await ours()
    await other()
    for _ in range(pairs):
        yield await ours(), await other()


@contextlib.asynccontextmanager
async def connected(
    host: str, protocol: str, model: str, payloads: Sequence[Payload]
) -> AsyncIterator[Connection]:
    """Yield functions that send requests to a tritonserver and return its statistics."""
    async with contextlib.aclosing(load_client.Client(Address(protocol, host))) as client:
        yield client.sender(model, payloads), partial(client.statistics, model)


def load(
    host: str, model: str, payloads: Sequence[Payload], concurrency: int, seconds: float
) -> Point:
    """Put one closed load on a model over gRPC."""

    async def run() -> Point:
        async with connected(host, "grpc", model, payloads) as connection:
            return await turn(connection, concurrency, seconds)

    return asyncio.run(run())


def ratios(pairs: Sequence[Pair]) -> list[float]:
    """Return the ratios of throughputs, ours ÷ other."""
    return [ours.result.throughput / other.result.throughput for ours, other in pairs]


def latency_ms(point: Point, share: float) -> float:
    """Return a percentile of the latencies in milliseconds."""
    return point.result.percentiles(share)[0] * 1e3


def rows_in_a_call(point: Point) -> float | None:
    """Return the mean rows in a call of the model; None if the server does not report it."""
    return point.server.rows / point.server.calls if point.server else None
