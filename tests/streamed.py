"""The table of models that make streams, and what a client must get.

It runs twice: through the adapter against the fake of Triton's utilities, and on a real
tritonserver over gRPC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import models
import numpy as np
import scenarios
from scenarios import Arrays, Refused, Scenario, assert_close


@dataclass(frozen=True)
class Stream:
    """A request, the responses to it in their order, and the error after them."""

    inputs: Arrays
    responses: Sequence[Arrays]
    error: Refused | None = None

    def check(self, came: Sequence[Arrays | str]) -> None:
        """Check what a client got: outputs by name, and the text of an error."""
        if self.error is not None:
            *came, message = came
            assert isinstance(message, str)
            self.error.check(message)
        assert len(came) == len(self.responses)
        for outputs, expected in zip(came, self.responses, strict=True):
            assert isinstance(outputs, dict), outputs
            assert outputs.keys() == expected.keys()
            for name, value in expected.items():
                assert outputs[name].shape == value.shape
                assert_close(outputs[name], value)


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

_AMISS = """
from torch import nn

class Amiss(nn.Module):
    def begin(self, x):
        return x

    def step(self, states):
        return [(None, states[0])]
"""
_UNARY = config(_COUNT, _Y, more="model_transaction_policy { decoupled: false }\n")
REFUSED = (
    scenarios.refused("stream_in_unary", scenarios.text(TICKER), _UNARY, "decoupled: true"),
    scenarios.refused(
        "yields_a_set",
        scenarios.text("def f(x):\n    yield {1}\n"),
        config({"x": "FP32"}, _Y),
        "output 'y' is a set",
    ),
    # One stream alone would do.
    scenarios.refused(
        "steps_amiss", scenarios.text(_AMISS), config({"x": "FP32"}, _Y), "list with 2 pairs"
    ),
)
