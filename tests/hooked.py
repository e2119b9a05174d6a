"""Models with hooks around forward(): a table of scenarios, as in `scenarios`."""

from __future__ import annotations

from typing import Any

import models
import numpy as np
import scenarios
from scenarios import Call, Refused, Scenario, both, config, floats, script, text

_HEADER = "import torch\nfrom torch import Tensor, nn\n\n\n"

# A text's letters are counted; the likeliest letter is the answer.
COUNTS = """\
class Counts(nn.Module):
    def forward(self, letters: Tensor) -> Tensor:
        return letters * 2.0


class Hooks:
    def preprocess(self, text: str) -> Tensor:
        counts = torch.zeros(26)
        for letter in text:
            if not "a" <= letter <= "z":
                raise ValueError(f"{letter!r} is no letter")
            counts[ord(letter) - 97] += 1
        if text == "crash":
            raise KeyError("/srv/secret/key")
        return counts

    def postprocess(self, result: Tensor, parameters) -> dict:
        if result.sum() == 0:
            raise ValueError("at 10.1.2.3: nothing to read")
        letter = chr(97 + int(result.argmax()))
        if parameters.get("loud"):
            letter = letter.upper()
        return {
            "letter": letter * int(parameters.get("times", 1)),
            "share": float(result.max() / result.sum()) * float(parameters.get("scale", 1.0)),
        }
"""
# Around an artifact that is no Python.
HALVES = """\
class Hooks:
    def preprocess(self, x: Tensor) -> Tensor:
        return x / 2

    def postprocess(self, result: Tensor) -> Tensor:
        return result + 1
"""


def strings(*rows: str) -> np.ndarray[Any, Any]:
    return np.array([[row.encode()] for row in rows], dtype=np.object_)


def numbers(*rows: float) -> np.ndarray[Any, Any]:
    return np.array([[row] for row in rows], dtype=np.float32)


COUNTS_CONFIG = config(
    {"text": ["STRING", 1]},
    {"share": [1], "letter": ["STRING", 1]},
    more="dynamic_batching { max_queue_delay_microseconds: 20000 }\n",
)
_ONE = Call({"text": strings("banana")}, {"letter": strings("a"), "share": numbers(0.5)})
_TWO = Call(
    {"text": strings("xx", "xyy")}, {"letter": strings("x", "y"), "share": numbers(1, 2 / 3)}
)
_LOUD = Call(
    {"text": strings("aab")},
    {"letter": strings("AAA"), "share": numbers(1 / 3)},
    {"loud": True, "times": 3, "scale": "0.5"},
)
_NO_LETTER = Call(
    {"text": strings("ab", "a b")},
    Refused(400, ("preprocess() refuses the input: ValueError: ' ' is no letter",)),
)
_CRASHES = Call({"text": strings("crash")}, Refused(500, ("preprocess() raised KeyError: 'key'",)))
_UNREAD = Call(
    {"text": strings("")},
    Refused(500, ("postprocess() raised ValueError: at (address): nothing to read",)),
)
_NO_TEXT = Call(
    {"text": scenarios.strings([b"\xff\xfe"])}, Refused(400, ("input 'text' is not UTF-8",))
)
_X = floats(2, 4)


TABLE = (
    Scenario(
        "hooks_counts",
        scenarios.hooked(_HEADER + COUNTS),
        COUNTS_CONFIG,
        (_ONE, _TWO, _LOUD, _NO_LETTER, _CRASHES, _UNREAD, _NO_TEXT),
        logs=("postprocess() raised ValueError", "KeyError"),
        batches=((_ONE, _NO_LETTER, _TWO, _UNREAD, _LOUD, _CRASHES),),
    ),
    Scenario(
        "hooks_beside_torchscript",
        both(script(models.Negate()), text(_HEADER + HALVES, "hooks.py")),
        config({"x": [4]}, {"y": [4]}),
        (Call({"x": _X}, {"y": 1 - _X / 2}),),
    ),
)
