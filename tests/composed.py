"""Models that call each other, and an ensemble of ours.

Those whose warm-up calls others load beside them, in whatever order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scenarios import Call, Refused, Scenario, config, hooked, strings, tensor

_CALLS = """\
import asyncio

import torch
from torch import Tensor, nn

from torch_py_backend.composition import model


"""
_DOUBLE = """\
class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x >= 100).any()):
            raise ValueError("too long")
        return 2 * x
"""
# Takes text, counts its letters.
_LENGTHS = """\
class Lengths(nn.Module):
    def forward(self, lengths: Tensor) -> Tensor:
        return lengths


class Hooks:
    def preprocess(self, text: str) -> Tensor:
        if not text:
            raise ValueError("no letters")
        return torch.tensor([float(len(text))])
"""
# Calls others in its hooks and, several at once, in forward().
_CALLER = """\
class Caller(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return asyncio.run(self.ask(x))

    async def ask(self, x: Tensor) -> Tensor:
        double = model("double")
        answers = await asyncio.gather(*(asyncio.to_thread(double, x=x + one) for one in range(3)))
        return sum(answer["y"] for answer in answers)


class Hooks:
    def preprocess(self, text: bytes) -> Tensor:
        return model("lengths")(text=[[text]])["y"][0]

    def postprocess(self, result: Tensor) -> Tensor:
        return model("double")(x=result.unsqueeze(0))["y"][0]
"""
_TEXT_TO_Y = config({"text": ["STRING", 1]}, {"y": [1]})
_ENSEMBLE = f"""platform: "ensemble"
max_batch_size: 8
{tensor("input", "text", [1], "STRING")}{tensor("output", "y", [1])}ensemble_scheduling {{
  step [
    {{ model_name: "lengths" model_version: -1
      input_map {{ key: "text" value: "text" }} output_map {{ key: "y" value: "length" }} }},
    {{ model_name: "double" model_version: -1
      input_map {{ key: "x" value: "length" }} output_map {{ key: "y" value: "y" }} }}
  ]
}}
"""


def _asked(expected: Any, *texts: str) -> Call:
    """The answer to texts, or the refusal of one."""
    if not isinstance(expected, Refused):
        expected = {"y": np.array(expected, dtype=np.float32)[:, None]}
    return Call({"text": strings(*([one] for one in texts))}, expected)


def _model(name: str, code: str, text: str, *calls: Call) -> Scenario:
    return Scenario(name, hooked(_CALLS + code), text, calls)


_SIXTY = _asked([60, 72], "four", "seven")
# The client gets the error of the model that was called.
TABLE = (
    _model("double", _DOUBLE, config({"x": [1]}, {"y": [1]}, more="dynamic_batching { }\n")),
    _model("lengths", _LENGTHS, _TEXT_TO_Y),
    _model(
        "caller",
        _CALLER,
        _TEXT_TO_Y,
        _SIXTY,
        _asked(Refused(500, ("'double': it answers: model 'd",)), 100 * "x"),
        _SIXTY,
    ),
    _model(
        "ensemble",
        "",
        _ENSEMBLE,
        _asked([8, 10], "four", "seven"),
        _asked(Refused(400, ("ValueError: no letters",)), ""),
        _asked([8], "four"),
    ),
)
