"""Models that answer with the trace that their code runs in.

An answer has two numbers: the ends of the ids of the current trace and of the current span.
"""

from __future__ import annotations

import json

import scenarios
from scenarios import Scenario

# What fits in an INT64 of an id.
_BITS = 62

_HEADER = f"""\
import torch
from opentelemetry import trace
from torch import Tensor, nn


def told(rows: int) -> Tensor:
    found = trace.get_current_span().get_span_context()
    ids = [one % 2**{_BITS} for one in (found.trace_id, found.span_id)]
    return torch.tensor([ids] * rows)


"""
_PLAIN = """\
class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative")
        return told(len(x))
"""
# Of a request's own rows, before forward() and after it.
_HOOKED = """\
class Hooked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Hooks:
    def preprocess(self, x: Tensor) -> Tensor:
        return told(1)[0]

    def postprocess(self, result: Tensor) -> Tensor:
        assert torch.equal(result, told(1)[0])
        return result
"""
_YIELDS = """\
class Yields(nn.Module):
    def forward(self, x: Tensor):
        for _ in range(2):
            yield told(len(x))
            if bool((x < 0).any()):
                raise ValueError("negative")
"""
_STEPS = """\
class Steps(nn.Module):
    def begin(self, x: Tensor):
        return 2, len(x)

    def step(self, states):
        return [((left - 1, rows) if left > 1 else None, told(rows)) for left, rows in states]
"""
_SUM = """\
class Sum(nn.Module):
    def forward(self, x: Tensor, sum_in: Tensor) -> dict:
        return {"y": told(len(x)), "sum_out": sum_in + x}
"""


def _scenario(name: str, code: str, more: str = "") -> Scenario:
    text = scenarios.config({"x": [1]}, {}, max_batch_size=4, more=more)
    text += scenarios.tensor("output", "y", [2], "INT64")
    return Scenario(name, scenarios.hooked(_HEADER + code), text)


_DECOUPLED = "model_transaction_policy { decoupled: true }\n"
_SEQUENCES = scenarios.sequencing(scenarios.state(("sum_in", "sum_out"), "1"))
TABLE = {
    one.name: one
    for one in (
        _scenario("plain", _PLAIN),
        _scenario("hooked", _HOOKED),
        _scenario("yields", _YIELDS, _DECOUPLED),
        _scenario("steps", _STEPS, _DECOUPLED),
        _scenario("sums", _SUM, _SEQUENCES),
    )
}


def ends(*ids: str) -> list[int]:
    return [int(one, 16) % 2**_BITS for one in ids]


def context(trace: str, span: str) -> str:
    """A trace's context as Triton tells it."""
    return json.dumps({"traceparent": f"00-{trace}-{span}-01", "tracestate": ""})
