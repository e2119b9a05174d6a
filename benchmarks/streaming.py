"""Token streams: the time between two tokens and the throughput, with steps together and apart.

    python -m benchmarks.streaming [--streams 64] [--pairs 5] [--output docs/streaming.md]

One server, and the same network twice: with begin() and step(), whose steps all live streams share,
and as a generator, which makes its own steps. In turn, A B A B, each is asked for so many streams
at once, and for as many one after the other. First all tokens are compared with those that the
network gives without a server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from rich.console import Console
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks import marks
from benchmarks.served import tokens
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


@dataclass(frozen=True)
class Turn:
    """One model asked for all streams. Times in seconds.

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
    wished = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _lay_out(Path(folder), wished.width, wished.streams)
        with _server(Path(folder)) as server:
            measured = asyncio.run(_measure(server, wished))
    text = _table(wished, measured)
    print(text)
    if wished.output is not None:
        marks.write(wished.output, "streaming", text)


def _lay_out(repository: Path, width: int, streams: int) -> None:
    for served in _MODELS:
        version = repository / served / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_bytes(Path(tokens.__file__).read_bytes())
        text = _CONFIG.format(served=served, width=width, streams=streams)
        (repository / served / "config.pbtxt").write_text(text)


@contextlib.contextmanager
def _server(repository: Path) -> Iterator[Server]:
    with (
        tempfile.TemporaryFile() as log,
        Server(repository, http_port=0, grpc_port=0, metrics_port=0, log=log) as server,
    ):
        for state in server.wait_loaded(timeout=120):
            if not state.ready:
                raise SystemExit(f"{state.name}: {state.reason}")
        yield server


async def _measure(
    server: Server, wished: argparse.Namespace
) -> dict[tuple[str, bool], list[Turn]]:
    found: dict[tuple[str, bool], list[Turn]] = {}
    cases = list(itertools.product(_MODELS, (True, False)))
    with Console(stderr=True).status("") as status:
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            expected = _expected(wished)
            for turn in range(wished.pairs + 1):  # the first is the warm-up
                for served, at_once in cases:
                    status.update(f"{turn} of {wished.pairs}: {_MODELS[served]}")
                    made = await _turn(server, stub, served, expected, at_once=at_once)
                    if turn:
                        found.setdefault((served, at_once), []).append(made)
    return found


def _expected(wished: argparse.Namespace) -> list[list[int]]:
    """The tokens of each stream, without a server."""
    model = tokens.Apart(wished.width).eval()
    with torch.inference_mode():
        return [
            [int(token) for token in model(first, wished.tokens)] for first in range(wished.streams)
        ]


async def _turn(
    server: Server, stub: Any, served: str, expected: list[list[int]], *, at_once: bool
) -> Turn:
    before = _steps(server, served)
    began = time.perf_counter()
    if at_once:
        came = await asyncio.gather(
            *(_stream(stub, served, first, one) for first, one in enumerate(expected))
        )
    else:
        came = [await _stream(stub, served, first, one) for first, one in enumerate(expected)]
    seconds = time.perf_counter() - began
    await asyncio.sleep(0.5)  # metrics are told now and then
    calls, streams = (now - old for now, old in zip(_steps(server, served), before, strict=True))
    gaps = np.concatenate([np.diff(one) for one in came])
    return Turn(sum(map(len, came)) / seconds, gaps, streams / calls if calls else None)


async def _stream(stub: Any, served: str, first: int, expected: list[int]) -> list[float]:
    """When each token of one stream came."""
    request = service_pb2.ModelInferRequest(model_name=served)
    for name, value in (("first", first), ("count", len(expected))):
        request.inputs.add(name=name, datatype="INT32", shape=[1])
        request.raw_input_contents.append(np.int32(value).tobytes())
    times, came = [], []
    async for message in stub.ModelStreamInfer(iter([request])):
        if message.error_message:
            raise SystemExit(message.error_message)
        times.append(time.perf_counter())
        came.append(int(np.frombuffer(message.infer_response.raw_output_contents[0], np.int32)[0]))
    if came != expected:
        raise SystemExit(f"{served}: stream {first} gave {came}, expected {expected}")
    return times


def _steps(server: Server, served: str) -> tuple[float, float]:
    """Calls of step() so far, and streams in them."""
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    mine = [line for line in lines if f'model="{served}"' in line]
    calls, streams = (
        sum(float(line.rpartition(" ")[2]) for line in mine if line.startswith(name))
        for name in ("pytorch_py_steps_total", "pytorch_py_stepped_streams_total")
    )
    return calls, streams


def _table(wished: argparse.Namespace, measured: dict[tuple[str, bool], list[Turn]]) -> str:
    rows = []
    for (served, at_once), turns in measured.items():
        gaps = np.concatenate([one.gaps for one in turns]) * 1000
        rates = [one.throughput for one in turns]
        shared = [one.shared for one in turns if one.shared is not None]
        p50, p99 = np.percentile(gaps, [50, 99])
        cells = (
            _MODELS[served],
            f"{wished.streams} at once" if at_once else "one at a time",
            f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
            f"{p50:.2f}",
            f"{p99:.2f}",
            f"{statistics.mean(shared):.1f}" if shared else "",
        )
        rows.append(f"| {' | '.join(cells)} |")
    head = "| steps | streams | tokens/s | between tokens, p50 ms | p99 ms | streams in a step |"
    note = (
        f"A GRU of width {wished.width}, {wished.streams} streams of {wished.tokens} tokens, one"
        f" instance, {wished.pairs} rounds in turn: median (least to most). All tokens are those of"
        " the network without a server."
    )
    return "\n".join((head, "|---|---|---|---|---|---|", *rows, "", note))


if __name__ == "__main__":
    main()
