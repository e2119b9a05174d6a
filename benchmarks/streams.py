"""Tokens per second of streams, with generators and with shared steps, in a real tritonserver.

    python -m benchmarks.streams [--against CHECKOUT] [--streams 64] [--tokens 50] [--turns 5]

A GRU of 128 continues a token, a vector of 16: `generator` yields each one, `steps` advances all
streams in one call of step(). All streams run at once, each in a gRPC stream of its own. The tokens
of all streams are compared with eager PyTorch's first; then the models take turns, A B C D … A.

`--against` serves each model twice, with this checkout's backend and with another one's; a ratio
is the median of the ratios of all turns, with the least and the largest.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import numpy as np
import torch
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks import harness, stubs
from benchmarks.tables import markdown, spread

_KINDS = ("generator", "steps")
_THIS, _OTHER = "this", "other"
_LONGEST_SECONDS = 600
_NETWORK = """
import torch
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(16, 128)
        self.tokens = nn.Linear(128, 16)

    def advance(self, tokens, states):
        states = self.cell(tokens, states)
        return self.tokens(states).tanh(), states
"""
_SERVED = {
    "generator": """

class Served(Network):
    def forward(self, start, count):
        token, state = start, torch.zeros(1, 128)
        for _ in range(int(count)):
            token, state = self.advance(token, state)
            yield token
""",
    "steps": """

class Served(Network):
    def begin(self, start, count):
        return start, torch.zeros(1, 128), int(count)

    def step(self, streams):
        tokens, states = (torch.cat(parts) for parts in list(zip(*streams))[:2])
        tokens, states = self.advance(tokens, states)
        return [
            ((token, state, left - 1) if left > 1 else None, token)
            for token, state, (_, _, left) in zip(tokens.split(1), states.split(1), streams)
        ]
""",
}
_CONFIG = """\
backend: "{backend}"
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "start" data_type: TYPE_FP32 dims: [1, 16] }},
  {{ name: "count" data_type: TYPE_INT64 dims: [1] }}
]
output [{{ name: "token" data_type: TYPE_FP32 dims: [1, 16] }}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
parameters {{ key: "MODEL_CLASS" value {{ string_value: "Served" }} }}
parameters {{ key: "WEIGHTS" value {{ string_value: "none" }} }}
parameters {{ key: "MAX_STREAMS" value {{ string_value: "{streams}" }} }}
"""


def starts(streams: int) -> NDArray[np.float32]:
    """Return the first token of each stream, [streams, 1, 16]."""
    return np.random.default_rng(0).standard_normal((streams, 1, 16), dtype=np.float32)


def expected(streams: int, tokens: int) -> NDArray[np.float32]:
    """Return the tokens of each stream, [streams, tokens, 16], from eager PyTorch."""
    scope: dict[str, type] = {}
    exec(_NETWORK, scope)  # noqa: S102  the text above
    network, columns = scope["Network"](), []
    token, state = torch.from_numpy(starts(streams)[:, 0]), torch.zeros(streams, 128)
    with torch.inference_mode():
        for _ in range(tokens):
            token, state = network.advance(token, state)
            columns.append(token.numpy())
    return np.stack(columns, axis=1)


async def run(
    address: str, model: str, streams: int, tokens: int
) -> tuple[float, NDArray[np.float32]]:
    """Run streams at once; return the tokens per second of all, and the tokens of each."""
    values = np.empty((streams, tokens, 16), np.float32)
    first = starts(streams)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        async def stream(place: int) -> None:
            number = 0
            async for answer in stub.ModelStreamInfer(_requests(model, first[place], tokens)):
                if answer.error_message:
                    raise RuntimeError(answer.error_message)
                (content,) = answer.infer_response.raw_output_contents
                values[place, number] = np.frombuffer(content, np.float32)
                number += 1
                if number == tokens:
                    break

        began = time.perf_counter()
        await asyncio.wait_for(asyncio.gather(*map(stream, range(streams))), _LONGEST_SECONDS)
        return streams * tokens / (time.perf_counter() - began), values


async def _requests(
    model: str, start: NDArray[np.float32], tokens: int
) -> AsyncIterator[service_pb2.ModelInferRequest]:
    yield stubs.request(model, {"start": start, "count": np.array([tokens])}, {})


def main(words: Sequence[str]) -> None:
    """Compare the tokens, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--turns", type=int, default=5)
    settings = parser.parse_args(words)
    load = (settings.streams, settings.tokens)
    checkouts = {_THIS: stubs.ROOT}
    if settings.against is not None:
        checkouts[_OTHER] = settings.against.absolute()
    models = [f"{kind}_{backend}" for kind in _KINDS for backend in checkouts]
    rates: dict[str, list[float]] = {model: [] for model in models}
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as name:
        for model in models:
            kind, backend = model.split("_")
            config = _CONFIG.format(backend=backend, streams=settings.streams)
            source = {"model.py": _NETWORK + _SERVED[kind]}
            harness.write_model(Path(name, "repository", model), config, source)
        variables = {"OMP_NUM_THREADS": "1"}
        with stubs.served(Path(name, "repository"), checkouts, variables) as server:
            right = expected(*load)
            for model in models:
                _, values = asyncio.run(run(server.grpc, model, *load))
                np.testing.assert_allclose(values, right, rtol=1e-4, atol=1e-5, err_msg=model)
            for turn in range(settings.turns):
                for model in models if turn % 2 == 0 else models[::-1]:
                    rates[model].append(asyncio.run(run(server.grpc, model, *load))[0])
    columns = ["model", "tokens/s", *([f"÷ {_OTHER}"] if _OTHER in checkouts else [])]
    table = []
    for kind in _KINDS:
        ours = rates[f"{kind}_{_THIS}"]
        row = [kind, spread(ours).text(0)]
        if _OTHER in checkouts:
            pairs = zip(ours, rates[f"{kind}_{_OTHER}"], strict=True)
            row.append(spread([first / second for first, second in pairs]).text(2))
        table.append(row)
    print(f"{settings.streams} streams of {settings.tokens} tokens\n")
    print(markdown(columns, table))


if __name__ == "__main__":
    main(sys.argv[1:])
