"""Token streams: the time between two tokens and the throughput, with steps together and apart.

    python -m benchmarks.streaming [--streams 64] [--pairs 5] [--output docs/streaming.md]

One server has the same network twice: with begin() and step(), whose steps all live streams share,
and as a generator, which makes its own steps. Both get all streams at once, and one after the
other, in turn, A B A B. All tokens are compared with those of the network without a server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from rich.console import Console
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks import harness
from benchmarks.served import tokens
from benchmarks.tables import markdown, spread, write_table
from torch_py_backend.server import Server

_CONFIG = """\
backend: "pytorch_py"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "first" data_type: TYPE_INT32 dims: [ 1 ] }},
  {{ name: "count" data_type: TYPE_INT32 dims: [ 1 ] }}
]
output [{{ name: "token" data_type: TYPE_INT32 dims: [ 1 ] }}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
parameters {{ key: "MODEL_CLASS" value {{ string_value: "{served}" }} }}
parameters {{ key: "MODEL_KWARGS" value {{ string_value: "{{\\"width\\": {width}}}" }} }}
parameters {{ key: "WEIGHTS" value {{ string_value: "none" }} }}
parameters {{ key: "MAX_STREAMS" value {{ string_value: "{streams}" }} }}
"""
# What is served, and in words.
_MODELS = {"Together": "step(), shared", "Apart": "generators"}
_COLUMNS = (
    "steps", "streams", "tokens/s", "between tokens, p50 ms", "p99 ms", "streams in a step",
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """All streams of one model. Times in seconds.

    Attributes:
        throughput: tokens a second.
        gaps: the times between two tokens of a stream.
        shared: streams in a step, on average; None where there is no step().
    """

    throughput: float
    gaps: np.ndarray[Any, np.dtype[np.float64]]
    shared: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="in each stream")
    parser.add_argument("--width", type=int, default=512, help="of the recurrent network")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a file whose table is replaced, or appended")
    settings = parser.parse_args()
    code = Path(tokens.__file__).read_text()
    with harness.scratch() as scratch:
        repository = Path(scratch) / "repository"
        for name in _MODELS:
            config = _CONFIG.format(served=name, width=settings.width, streams=settings.streams)
            harness.write_model(repository / name, config, {"model.py": code})
        with harness.served(repository) as server:
            text = _table(settings, asyncio.run(_measure(server, settings)))
    print(text)
    if settings.output is not None:
        write_table(settings.output, "streaming", text)


async def _measure(
    server: Server, settings: argparse.Namespace
) -> dict[tuple[str, bool], list[Turn]]:
    turns: dict[tuple[str, bool], list[Turn]] = {}
    cases = list(itertools.product(_MODELS, (True, False)))
    with Console(stderr=True).status("") as status:
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            expected = _expected(settings)
            for number in range(settings.pairs + 1):  # the first is the warm-up
                for served, at_once in cases:
                    status.update(f"{number} of {settings.pairs}: {_MODELS[served]}")
                    measured = await _turn(server, stub, served, expected, at_once=at_once)
                    if number:
                        turns.setdefault((served, at_once), []).append(measured)
    return turns


def _expected(settings: argparse.Namespace) -> list[list[int]]:
    """Return the tokens of each stream, computed without a server."""
    model = tokens.Apart(settings.width).eval()
    with torch.inference_mode():
        return [
            [int(token) for token in model(first, settings.tokens)]
            for first in range(settings.streams)
        ]


async def _turn(
    server: Server, stub: Any, served: str, expected: list[list[int]], *, at_once: bool
) -> Turn:
    before = _steps(server, served)
    start = time.perf_counter()
    streams = [_stream(stub, served, first, wanted) for first, wanted in enumerate(expected)]
    if at_once:
        times = await asyncio.gather(*streams)
    else:
        times = [await stream for stream in streams]
    seconds = time.perf_counter() - start
    await asyncio.sleep(0.5)  # metrics are updated now and then
    calls, stepped = (now - old for now, old in zip(_steps(server, served), before, strict=True))
    gaps = np.concatenate([np.diff(stream_times) for stream_times in times])
    return Turn(sum(map(len, times)) / seconds, gaps, stepped / calls if calls else None)


async def _stream(stub: Any, served: str, first: int, expected: list[int]) -> list[float]:
    """Return the times of the tokens of one stream."""
    request = service_pb2.ModelInferRequest(model_name=served)
    for name, value in (("first", first), ("count", len(expected))):
        request.inputs.add(name=name, datatype="INT32", shape=[1])
        request.raw_input_contents.append(np.int32(value).tobytes())
    times, values = [], []
    async for message in stub.ModelStreamInfer(iter([request])):
        if message.error_message:
            raise SystemExit(message.error_message)
        times.append(time.perf_counter())
        values.append(
            int(np.frombuffer(message.infer_response.raw_output_contents[0], np.int32)[0])
        )
    if values != expected:
        raise SystemExit(f"{served}: stream {first} gave {values}, expected {expected}")
    return times


def _steps(server: Server, served: str) -> tuple[float, float]:
    """Return the calls of step() so far, and the streams in them."""
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    of_model = [line for line in lines if f'model="{served}"' in line]
    calls, streams = (
        sum(float(line.rpartition(" ")[2]) for line in of_model if line.startswith(name))
        for name in ("pytorch_py_steps_total", "pytorch_py_stepped_streams_total")
    )
    return calls, streams


def _table(settings: argparse.Namespace, measured: dict[tuple[str, bool], list[Turn]]) -> str:
    rows = []
    for (served, at_once), turns in measured.items():
        gaps = np.concatenate([turn.gaps for turn in turns]) * 1000
        rates = spread([turn.throughput for turn in turns])
        shared = [turn.shared for turn in turns if turn.shared is not None]
        rows.append(
            (
                _MODELS[served],
                f"{settings.streams} at once" if at_once else "one at a time",
                f"{rates.median:,.0f} ({rates.least:,.0f} to {rates.most:,.0f})",
                *(f"{value:.2f}" for value in np.percentile(gaps, [50, 99])),
                f"{statistics.mean(shared):.1f}" if shared else "",
            )
        )
    note = (
        f"A GRU of width {settings.width}, {settings.streams} streams of {settings.tokens} tokens,"
        f" one instance, {settings.pairs} rounds in turn: median (least to most). All tokens are"
        " those of the network without a server."
    )
    return f"{markdown(_COLUMNS, rows)}\n\n{note}"


if __name__ == "__main__":
    main()
