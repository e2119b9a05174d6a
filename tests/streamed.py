"""Models that make streams: engines of functions, and a table of what a client must get.

The table runs twice: through the adapter against the fake of Triton's utilities, and on a real
tritonserver over gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import engines
import models
import numpy as np
import scenarios
import torch
from scenarios import Arrays, Refused, Scenario

from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.streams import Streams
from torch_py_backend.errors import BackendError
from torch_py_backend.values import Value


def engine(
    function: Callable[..., Any], step: Callable[[list[Any]], Any] | None = None, **overrides: Any
) -> Engine:
    """An engine of one input `x` and one output `y`, both FP32 [-1], in rows."""
    return engines.engine(function, step=step, decoupled=True, **overrides)


def item(*values: float) -> dict[str, Value]:
    return {"x": torch.tensor([values], dtype=torch.float32)}


@dataclass
class Recorder:
    """A client that keeps what a stream gives, and leaves after so many responses."""

    leaves_after: int | None = None
    values: list[list[list[float]]] = field(default_factory=list)
    error: BackendError | None = None

    async def receive(self, streams: Streams, item: dict[str, Value]) -> None:
        self.error = await streams.run(item, self.send)

    def send(self, outcome: dict[str, Value], last: bool) -> bool:
        self.values.append(torch.as_tensor(outcome["y"]).tolist())
        return len(self.values) != self.leaves_after

    @property
    def text(self) -> str:
        return "" if self.error is None else self.error.traceback


def run(model: Engine, *pairs: tuple[dict[str, Value], Recorder]) -> Streams:
    streams = Streams(model)

    async def together() -> None:
        with runtime.mode(model.config.options):
            await asyncio.gather(*(client.receive(streams, item) for item, client in pairs))

    asyncio.run(together())
    return streams


@dataclass(frozen=True)
class Stream:
    """A request, the responses to it in their order, and the error after them."""

    inputs: Arrays
    responses: Sequence[Arrays]
    error: Refused | None = None


@dataclass(frozen=True)
class Streamed:
    """One model, and the streams that clients get of it."""

    scenario: Scenario
    streams: tuple[Stream, ...]


_DECOUPLED = "model_transaction_policy { decoupled: true }\n"


def config(
    inputs: dict[str, str], outputs: dict[str, str], *, rows: int = 0, more: str = _DECOUPLED
) -> str:
    """A config whose tensors have one value each (a row), of the types that are given."""
    taken: scenarios.Specs = {name: [kind, 1] for name, kind in inputs.items()}
    given: scenarios.Specs = {name: [kind, 1] for name, kind in outputs.items()}
    return scenarios.config(taken, given, max_batch_size=rows, more=more)


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int32)


def floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.float32)


def _ticks(count: int, start: float = 0.0) -> list[Arrays]:
    return [{"y": floats(start + tick)} for tick in range(count)]


TICKER = """
import torch


class Ticker(torch.nn.Module):
    def forward(self, count: int):
        for tick in range(count):
            if tick == 7:
                raise ValueError("seven, see /srv/secret/place/readme.txt")
            # Another shape in mid-stream.
            yield torch.tensor([float(tick)] * (2 if count > 20 and tick == 2 else 1))
"""
ASYNCHRONOUS = """
import asyncio

import torch


class Ticker(torch.nn.Module):
    async def forward(self, count: int, pause: float = 0.001):
        for tick in range(count):
            await asyncio.sleep(pause)
            yield {"y": torch.tensor([float(tick)])}
"""
ROWS = """
def multiples(x, count: int):
    # An iterator that is no generator.
    return map(lambda factor: (factor * x, [[f"{factor} times"]] * len(x)), range(1, count + 1))
"""
CONTINUOUS = """
import torch
from torch import Tensor, nn


class Counter(nn.Module):
    def begin(self, start: float, count: int):
        if count < 0:
            raise ValueError("fewer than none")
        return torch.tensor([start]), count

    def step(self, states):
        values = torch.stack([value for value, _ in states])
        if (values > 99).any():
            raise ValueError("more than 99")
        return [
            ((value + 1, count - 1) if count > 1 else None, value if count > 0 else None)
            for value, (_, count) in zip(values, states)
        ]
"""
_COUNT = {"count": "INT32"}
_Y = {"y": "FP32"}
_SEVEN = "model 'ticker': forward() raised ValueError: seven, see readme.txt."
_WIDER = "output 'y' is float32 [2]; expected float32 [1]"


def _counted(count: int, responses: Sequence[Arrays], *says: str, **more: Any) -> Stream:
    error = Refused(500, says) if says else None
    return Stream({"count": ints(count), **more}, responses, error)


def _multiples(*counts: int, error: Refused | None = None) -> Stream:
    """Two rows, and their multiples up to counts that must be one number."""
    factors = () if error else range(1, counts[0] + 1)
    responses = [
        {
            "y": floats(factor, 2 * factor)[:, None],
            "said": scenarios.strings(*[[f"{factor} times".encode()]] * 2),
        }
        for factor in factors
    ]
    return Stream({"x": floats(1, 2)[:, None], "count": ints(*counts)[:, None]}, responses, error)


def _streamed(name: str, code: str, text: str, *streams: Stream) -> Streamed:
    return Streamed(Scenario(name, scenarios.text(code), text), streams)


TABLE = (
    _streamed(
        "ticker",
        TICKER,
        config(_COUNT, _Y),
        *(_counted(count, _ticks(count)) for count in (3, 1, 0)),
        _counted(21, _ticks(2), _WIDER),
        _counted(9, _ticks(7), _SEVEN),
    ),
    _streamed(
        "asynchronous",
        ASYNCHRONOUS,
        config(_COUNT, _Y) + scenarios.tensors("input", {"pause": [1, "optional: true"]}),
        _counted(3, _ticks(3)),
        _counted(2, _ticks(2), pause=floats(0.1)),
    ),
    _streamed(
        "rows",
        ROWS,
        config({"x": "FP32", **_COUNT}, {"y": "FP32", "said": "STRING"}, rows=4),
        _multiples(2, 2),
        _multiples(2, 3, error=Refused(400, ("input 'count' holds 2 values",))),
    ),
    _streamed(
        "continuous",
        CONTINUOUS,
        config({"start": "FP32", **_COUNT}, _Y),
        _counted(3, _ticks(3, 5.0), start=floats(5)),
        _counted(0, [], start=floats(5)),
        _counted(-1, [], "begin() raised ValueError: fewer than none", start=floats(5)),
        _counted(5, _ticks(2, 98.0), "step() raised ValueError: more than 99", start=floats(98)),
    ),
    _streamed(
        "plain",
        models.source(models.double),
        config({"x": "FP32"}, _Y),
        Stream({"x": floats(4)}, [{"y": floats(8)}]),
    ),
)

_NOT_DECOUPLED = "model_transaction_policy { decoupled: false }\n"
_X = {"x": "FP32"}
_AUTOCAST = """
import torch

def forward(x):
    with torch.autocast('cpu'):
        yield x
        yield x
"""
_AMISS = """
from torch import nn

class Amiss(nn.Module):
    def begin(self, x):
        return x

    def step(self, states):
        return [(None, states[0])]
"""
_REFUSED = (
    ("stream_in_unary", TICKER, config(_COUNT, _Y, more=_NOT_DECOUPLED), "decoupled: true"),
    ("yields_in_autocast", _AUTOCAST, config(_X, _Y), "yields within torch.autocast"),
    ("yields_rubbish", "def f(x):\n    yield {1}\n", config(_X, _Y), "output 'y' is a set"),
    # One stream alone would do.
    ("steps_amiss", _AMISS, config(_X, _Y), "expected a list with 2 pairs"),
)
REFUSED = tuple(
    Scenario(name, scenarios.text(code), text, load_error=(says,))
    for name, code, text, says in _REFUSED
)
