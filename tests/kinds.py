"""Trees of inputs and results, hooks, and completed configs for each kind of artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import numpy as np
import scenarios
import torch
from scenarios import BARE, Call, Refused, Scenario, Writer, config, floats
from torch import Tensor, nn


class Nested(nn.Module):
    """Keys in another order than an alphabet's: a rebuilt dict must not swap its tensors."""

    def forward(self, x: Tensor, extra: dict[str, Any], *, scale: Tensor) -> dict[str, Any]:
        total = x + 10 * extra["z"] + 100 * extra["a"][0] + 1000 * extra["a"][1]
        return {"total": total * scale, "parts": (x, [extra["z"]])}


class NestedScript(nn.Module):
    """What of it TorchScript can say."""

    def forward(
        self, x: Tensor, extra: tuple[Tensor, list[Tensor]], scale: Tensor
    ) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        total = x + 10 * extra[0] + 100 * extra[1][0] + 1000 * extra[1][1]
        return total * scale, (x, [extra[0]])


_X, _Z, _A, _B, _SCALE = (floats(3, 2, seed=seed) for seed in range(5))
_TOTAL = (_X + 10 * _Z + 100 * _A + 1000 * _B) * _SCALE


def _save_program(folder: Path) -> None:
    """Exported when it is needed: that takes a second."""

    def tensor() -> Tensor:  # each an object of its own
        return torch.rand(2, 2)

    args, kwargs = (tensor(), {"z": tensor(), "a": [tensor(), tensor()]}), {"scale": tensor()}
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    shapes = {"x": batch, "extra": {"z": batch, "a": [batch, batch]}, "scale": batch}
    program = torch.export.export(Nested(), args, kwargs, dynamic_shapes=shapes)
    torch.export.save(program, folder / "model.pt2")


def _nested(name: str, write: Writer, inputs: str, out: dict[str, Any]) -> Scenario:
    """Inputs are the second tensor of `a`, z, x, the first tensor of `a`, and scale."""
    values = dict(zip(inputs.split(), (_B, _Z, _X, _A, _SCALE), strict=True))
    listed = config({name: [2] for name in values}, {name: [2] for name in out})
    return Scenario(name, write, listed, (Call(values, out),))


_NESTED_INPUTS = "ARGS[1][a][1] ARGS[1][z] ARGS[0] ARGS[1][a][0] KWARGS[scale]"
_NESTED_OUT = {"RESULT[parts][1][0]": _Z, "total": _TOTAL, "RESULT[parts][0]": _X}


_EXAMPLE_FUNCTION = """


def example_inputs():
    return {"x": torch.rand(2, 4)}
"""
_DIGITS = Path(__file__).parents[1] / "examples" / "model_repository"
_IMAGES = floats(8, 1, 8, 8)
_SCORES = torch.jit.load(_DIGITS / "digits_torchscript/1/model.pt")(torch.from_numpy(_IMAGES))


# A text's letters are counted; the likeliest letter is the answer.
_COUNTS = """\
import torch
from torch import Tensor, nn


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
_HALVES = """\
from torch import Tensor


class Hooks:
    def preprocess(self, x: Tensor) -> Tensor:
        return x / 2

    def postprocess(self, result: Tensor) -> Tensor:
        return result + 1
"""


def _strings(*texts: str) -> np.ndarray[Any, Any]:
    return scenarios.strings(*([text.encode()] for text in texts))


def _counted(texts: list[str], answer: dict[str, float] | Refused, **parameters: Any) -> Call:
    """The letter of each text and its share; or one refusal."""
    expected: Any = answer
    if isinstance(answer, dict):
        shares = np.array([[share] for share in answer.values()], dtype=np.float32)
        expected = {"letter": _strings(*answer), "share": shares}
    return Call({"text": _strings(*texts)}, expected, parameters)


_LETTERS = (
    _counted(["banana"], {"a": 1 / 2}),
    _counted(["ab", "a b"], Refused(400, ("preprocess() refuses the input", "' ' is no letter"))),
    _counted(["xx", "xyy"], {"x": 1, "y": 2 / 3}),
    _counted([""], Refused(500, ("postprocess() raised ValueError: at (address): nothing",))),
    _counted(["aab"], {"AAA": 1 / 3}, loud=True, times=3, scale="0.5"),
    _counted(["crash"], Refused(500, ("preprocess() raised KeyError: 'key'",))),
)
_ROWS = floats(2, 4)


TABLE = (
    Scenario(
        "hooks_counts",
        scenarios.hooked(_COUNTS),
        config(
            {"text": ["STRING", 1]},
            {"share": [1], "letter": ["STRING", 1]},
            more="dynamic_batching { max_queue_delay_microseconds: 20000 }\n",
        ),
        (
            *_LETTERS,
            Call(
                {"text": scenarios.strings([b"\xff\xfe"])},
                Refused(400, ("input 'text' is not UTF-8",)),
            ),
        ),
        logs=("postprocess() raised ValueError", "KeyError"),
        batches=(_LETTERS,),
    ),
    Scenario(
        "hooks_beside_torchscript",
        scenarios.both(scenarios.script(models.Negate()), scenarios.text(_HALVES, "hooks.py")),
        config({"x": [4]}, {"y": [4]}),
        (Call({"x": _ROWS}, {"y": 1 - _ROWS / 2}),),
    ),
    _nested(
        "torchscript_nested",
        scenarios.script(NestedScript()),
        "ARGS[1][1][1] ARGS[1][0] ARGS[0] ARGS[1][1][0] scale",
        {"RESULT[1][1][0]": _Z, "RESULT[0]": _TOTAL, "OUTPUT__1": _X},
    ),
    _nested("module_nested", scenarios.python(Nested), _NESTED_INPUTS, _NESTED_OUT),
    _nested("export_nested", _save_program, _NESTED_INPUTS, _NESTED_OUT),
    Scenario(  # AOTInductor's, which takes any number of rows
        "complete_aoti",
        scenarios.both(
            scenarios.raw((_DIGITS / "digits_aoti/1/model.pt2").read_bytes(), "model.pt2"),
            scenarios.safe({"INPUT__0": torch.rand(2, 1, 8, 8)}, "example_inputs.safetensors"),
        ),
        BARE,
        tuple(
            Call({"INPUT__0": _IMAGES[:rows]}, {"OUTPUT__0": _SCORES.detach().numpy()[:rows]})
            for rows in (1, 3, 8)
        ),
    ),
    scenarios.refused(
        "complete_without_examples",
        scenarios.python(models.Negate),
        BARE,
        "no inputs are listed, and",
        "expected example_inputs.safetensors",
    ),
    scenarios.refused(  # it ends the process that completes its config
        "complete_crashes",
        scenarios.text("import ctypes\n\nctypes.string_at(0)\n"),
        BARE,
        "trying the model ended the process with SIGSEGV",
    ),
    # A type that the artifact contradicts.
    scenarios.refused(
        "torchscript_of_strings",
        scenarios.script(models.Negate()),
        config({"x": ["STRING", 4]}, {"y": [4]}, parameters={"WARMUP": "false"}),
        "input 'x' is BYTES, and forward() takes a tensor",
    ),
)
