"""Kinds of artifacts with kinds of inputs: a table of scenarios, made, not written."""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import scenarios
import torch
from scenarios import BARE, Call, Refused, Scenario, Writer, config, floats, tensor
from torch import Tensor, nn


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


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


class Texts(nn.Module):
    def forward(self, texts: list[str]) -> tuple[Tensor, list[str]]:
        lengths = [len(text) for text in texts]
        return torch.tensor(lengths), [text + "!" for text in texts]


@dataclass(frozen=True)
class Case:
    """One kind of input.

    Attributes:
        args: sample arguments for torch.export, each tensor an object of its own.
        scripted: what TorchScript is given instead, with its config and its calls.
    """

    module: Callable[[], nn.Module]
    config: str
    calls: tuple[Call, ...]
    args: Callable[[], tuple[Any, ...]] = tuple
    kwargs: Callable[[], dict[str, Any]] = dict
    scripted: tuple[Callable[[], nn.Module], str, tuple[Call, ...]] | None = None
    kinds: tuple[str, ...] = ("torchscript", "module", "export")


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().eval()


_ONE = _seeded(One)


def _one_call(rows: int) -> Call:
    x = floats(rows, 4, seed=rows)
    return Call({"x": x}, {"y": scenarios.eager(_ONE, x=x)})


_CALLS = tuple(_one_call(rows) for rows in (1, 3, 4, 8, 2))
# Two instances are served from the same file.
_ONE_CONFIG = config(
    {"x": [4]},
    {"y": [3]},
    more="dynamic_batching { }\ninstance_group [{ kind: KIND_CPU count: 2 }]\n",
)
_A, _B, _C, _D, _S = (floats(3, 2, seed=seed) for seed in range(5))
_NESTED_INPUTS = {"x": "ARGS[0]", "z": "ARGS[1][z]", "a": "ARGS[1][a][0]", "b": "ARGS[1][a][1]"}
_SCRIPT_INPUTS = {"x": "ARGS[0]", "z": "ARGS[1][0]", "a": "ARGS[1][1][0]", "b": "ARGS[1][1][1]"}


def _nested_values(names: dict[str, str], scale: str) -> dict[str, Any]:
    values = {"x": _A, "z": _B, "a": _C, "b": _D}
    return {names[key]: values[key] for key in ("b", "z", "x", "a")} | {scale: _S}


def _nested(names: dict[str, str], scale: str, out: dict[str, Any]) -> tuple[str, tuple[Call, ...]]:
    values = _nested_values(names, scale)
    text = config({name: [2] for name in values}, {name: [2] for name in out})
    return text, (Call(values, out),)


_TOTAL = (_A + 10 * _B + 100 * _C + 1000 * _D) * _S
_NESTED_OUT = {"RESULT[parts][1][0]": _B, "total": _TOTAL, "RESULT[parts][0]": _A}
_SCRIPT_OUT = {"RESULT[1][1][0]": _B, "RESULT[0]": _TOTAL, "OUTPUT__1": _A}
_TEXTS = config({"texts": ["STRING", 1]}, {"length": ["INT64", 1], "louder": ["STRING", 1]})


def _said(*texts: str) -> Call:
    louder = scenarios.strings(*([f"{text}!".encode()] for text in texts))
    lengths = np.array([[len(text)] for text in texts])
    return Call(
        {"texts": scenarios.strings(*([text] for text in texts))},
        {"length": lengths, "louder": louder},
    )


def _not_text(refused: Refused) -> Call:
    return Call({"texts": scenarios.strings([b"\xff"])}, refused)


def _tensor() -> Tensor:
    return torch.rand(2, 2)


# registered.py has a package of AOTInductor with a tree of inputs, for two rows.
CASES = {
    "one": Case(One, _ONE_CONFIG, _CALLS, lambda: (torch.rand(2, 4),)),
    "nested": Case(
        Nested,
        *_nested(_NESTED_INPUTS, "KWARGS[scale]", _NESTED_OUT),
        lambda: (_tensor(), {"z": _tensor(), "a": [_tensor(), _tensor()]}),
        lambda: {"scale": _tensor()},
        (NestedScript, *_nested(_SCRIPT_INPUTS, "scale", _SCRIPT_OUT)),
    ),
    "strings": Case(
        Texts,
        _TEXTS,
        (
            _said("a", "bcd", "ef"),
            _not_text(Refused(400, ("input 'texts' is not UTF-8",))),
            _said("z"),
        ),
        scripted=(
            Texts,
            _TEXTS,
            (_not_text(Refused(500, ("forward() raised UnicodeDecodeError",))), _said("z")),
        ),
        kinds=("torchscript", "module"),
    ),
}


def _program(case: Case) -> torch.export.ExportedProgram:
    args, kwargs = case.args(), case.kwargs()
    batch = torch.export.Dim("batch", min=1, max=64)
    shapes = torch.utils._pytree.tree_map(lambda one: {0: batch}, (args, kwargs))
    names = inspect.signature(case.module.forward).parameters  # type: ignore[attr-defined]
    dynamic = dict(zip([*names][1:], (*shapes[0], *shapes[1].values()), strict=True))
    return torch.export.export(_seeded(case.module), args, kwargs, dynamic_shapes=dynamic)


@functools.cache
def _exported(name: str) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(_program(CASES[name]), buffer)
    return buffer.getvalue()


def _write(kind: str, name: str) -> Writer:
    """Return a writer that makes the artifact when it is needed: exporting takes seconds."""

    def write(folder: Path) -> None:
        case = CASES[name]
        if kind == "torchscript":
            made = case.scripted[0] if case.scripted else case.module
            scenarios.script(_seeded(made))(folder)
        elif kind == "export":
            (folder / "model.pt2").write_bytes(_exported(name))
        else:
            scenarios.python(case.module)(folder)
            if state := _seeded(case.module).state_dict():
                scenarios.safe(state)(folder)

    return write


def _scenario(kind: str, name: str) -> Scenario:
    case = CASES[name]
    text, calls = case.config, case.calls
    if kind == "torchscript" and case.scripted:
        _, text, calls = case.scripted
    return Scenario(f"{kind}_{name}", _write(kind, name), text, calls)


_ONE_NAMED = tuple(
    Call(call.inputs, {"OUTPUT__0": call.expected["y"]})  # type: ignore[index]
    for call in _CALLS
)
_EXAMPLE_FUNCTION = """


def example_inputs():
    return {"x": torch.rand(2, 4)}
"""
_EXAMPLE_TEXTS = """


def example_inputs():
    return {"texts": ["one", "two"]}
"""
_DIGITS = Path(__file__).parents[1] / "examples" / "model_repository"
# AOTInductor's, which takes any number of rows.
_PACKAGE = scenarios.raw((_DIGITS / "digits_aoti/1/model.pt2").read_bytes(), "model.pt2")


def _digits(rows: int) -> Call:
    x = floats(rows, 1, 8, 8)
    module = torch.jit.load(_DIGITS / "digits_torchscript/1/model.pt")
    return Call({"INPUT__0": x}, {"OUTPUT__0": module(torch.from_numpy(x)).detach().numpy()})


_NESTED_SHORT = {"x": "x", "z": "z", "a": "ARGS[1][a][0]", "b": "ARGS[1][a][1]"}


def _examples(state: dict[str, Tensor]) -> Writer:
    return scenarios.safe(state, "example_inputs.safetensors")


# The refusals that a real server runs, too: what ends the process that completes a config.
COMPLETED = (
    Scenario(
        "complete_export_nested",
        _write("export", "nested"),
        BARE,
        (
            Call(
                _nested_values(_NESTED_SHORT, "scale"),
                {"total": _TOTAL, "OUTPUT__1": _A, "OUTPUT__2": _B},
            ),
        ),
    ),
    Scenario(
        "complete_aoti",
        scenarios.both(_PACKAGE, _examples({"INPUT__0": torch.rand(2, 1, 8, 8)})),
        BARE,
        tuple(_digits(rows) for rows in (1, 3, 8)),
    ),
    Scenario(
        "complete_torchscript",
        scenarios.both(_write("torchscript", "one"), _examples({"x": torch.rand(2, 4)})),
        BARE,
        _ONE_NAMED,
    ),
    Scenario(
        "complete_strings",
        scenarios.text(models.source(Texts) + _EXAMPLE_TEXTS),
        BARE,
        (
            Call(
                {"texts": scenarios.strings(["z"])},
                {"OUTPUT__0": np.array([[1]]), "OUTPUT__1": scenarios.strings([b"z!"])},
            ),
        ),
    ),
    Scenario(
        "complete_outputs_only",
        scenarios.both(
            scenarios.text(models.source(One) + _EXAMPLE_FUNCTION),
            scenarios.safe(_ONE.state_dict()),
        ),
        BARE + "max_batch_size: 8\n" + tensor("input", "x", [4]),
        _ONE_NAMED,
    ),
    scenarios.refused(
        "complete_without_examples",
        scenarios.python(One),
        BARE + scenarios.option("WEIGHTS", "none"),
        "config.pbtxt lists no inputs, and",
        "expected example_inputs.safetensors",
    ),
    scenarios.refused(
        "complete_crashes",
        scenarios.text("import ctypes\n\nctypes.string_at(0)\n"),
        BARE,
        "trying the model ended the process with SIGSEGV",
    ),
)


# Types that the artifact contradicts.
_WITHOUT_WARMUP = scenarios.option("WARMUP", "false")
CONTRADICTED = (
    scenarios.refused(
        "torchscript_of_strings",
        _write("torchscript", "one"),
        _ONE_CONFIG.replace("TYPE_FP32", "TYPE_STRING", 1) + _WITHOUT_WARMUP,
        "input 'x' is BYTES, and forward() takes a tensor",
    ),
)


TABLE = (
    *(_scenario(kind, name) for name, case in CASES.items() for kind in case.kinds),
    *COMPLETED,
    *CONTRADICTED,
)
