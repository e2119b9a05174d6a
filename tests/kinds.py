"""Kinds of artifacts with kinds of inputs: a table of scenarios, made, not written."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import scenarios
import torch
from scenarios import Call, Refused, Scenario, Writer, config, floats, tensor
from torch import Tensor, nn


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Difference(nn.Module):
    """Takes one dict, whose keys name its tensors; two of them are BF16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -2.0], dtype=torch.bfloat16))

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return inputs["first"] - inputs["second"], inputs["half"] * self.weight


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


class Lookup(nn.Module):
    """Fails for a number that its table does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Texts(nn.Module):
    def forward(self, texts: list[str]) -> tuple[Tensor, list[str]]:
        lengths = [len(text) for text in texts]
        return torch.tensor(lengths), [text + "!" for text in texts]


# registered.py has a package of AOTInductor with a tree of inputs, for two rows.
_TRACED = ("torchscript", "module", "export")


@dataclass(frozen=True)
class Case:
    """One kind of input.

    Attributes:
        module: what is served.
        scripted: what TorchScript is given instead.
        args: sample arguments for torch.export, each tensor an object of its own.
        config: the text of config.pbtxt.
        calls: requests and answers.
        script_calls: those of TorchScript, where it answers otherwise.
        kinds: the artifacts.
        batches: requests that are sent at once.
    """

    module: Callable[[], nn.Module]
    args: Callable[[int], tuple[Any, ...]]
    config: str
    calls: tuple[Call, ...]
    scripted: Callable[[], nn.Module] | None = None
    script_config: str | None = None
    script_calls: tuple[Call, ...] = ()
    kwargs: Callable[[int], dict[str, Any]] = lambda rows: {}
    fixed: int | None = None
    kinds: tuple[str, ...] = _TRACED
    batches: tuple[tuple[Call, ...], ...] = ()


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().eval()


_ONE = _seeded(One)


_LOOKUP = _seeded(Lookup)


def _looked_up(*ids: int) -> Call:
    rows = np.array(ids)[:, None]
    if max(ids) > 9:
        return Call({"ids": rows}, Refused(500, ("index", "out of ")))
    return Call({"ids": rows}, {"y": scenarios.eager(_LOOKUP, ids=rows)})


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


_TOTAL = (_A + 10 * _B + 100 * _C + 1000 * _D) * _S
_NESTED_OUT = {"RESULT[parts][1][0]": _B, "total": _TOTAL, "RESULT[parts][0]": _A}
_SCRIPT_OUT = {"RESULT[1][1][0]": _B, "RESULT[0]": _TOTAL, "OUTPUT__1": _A}
_BFLOAT = torch.tensor([[1.5, -1.0], [3.0, 0.5], [2.0, 8.0]], dtype=torch.bfloat16)

CASES = {
    "one": Case(
        One,
        lambda rows: (torch.rand(rows, 4),),
        _ONE_CONFIG,
        _CALLS,
        kinds=(*_TRACED, "factory"),
    ),
    "fixed": Case(
        One,
        lambda rows: (torch.rand(rows, 4),),
        config({"x": [4]}, {"y": [3]}),
        _CALLS,
        fixed=4,
        kinds=("export",),
    ),
    "dict": Case(
        Difference,
        lambda rows: (
            {
                "first": torch.rand(rows, 2),
                "second": torch.rand(rows, 2),
                "half": torch.rand(rows, 2).bfloat16(),
            },
        ),
        config({"second": [2], "first": [2]}, {"y": [2]})
        + tensor("input", "half", [2], "BF16")
        + tensor("output", "scaled", [2], "BF16"),
        (
            Call(
                {"second": _B, "first": _A, "half": _BFLOAT},
                {"y": _A - _B, "scaled": _BFLOAT * torch.tensor([0.5, -2.0]).bfloat16()},
            ),
        ),
    ),
    "nested": Case(
        Nested,
        lambda rows: (
            torch.rand(rows, 2),
            {"z": torch.rand(rows, 2), "a": [torch.rand(rows, 2), torch.rand(rows, 2)]},
        ),
        config(
            {name: [2] for name in _nested_values(_NESTED_INPUTS, "KWARGS[scale]")},
            {name: [2] for name in _NESTED_OUT},
        ),
        (Call(_nested_values(_NESTED_INPUTS, "KWARGS[scale]"), _NESTED_OUT),),
        scripted=NestedScript,
        script_config=config(
            {name: [2] for name in _nested_values(_SCRIPT_INPUTS, "scale")},
            {name: [2] for name in _SCRIPT_OUT},
        ),
        kwargs=lambda rows: {"scale": torch.rand(rows, 2)},
    ),
    "lookup": Case(
        Lookup,
        lambda rows: (torch.ones(rows, 1, dtype=torch.int64),),
        config({}, {"y": [1, 3]}, more=scenarios.TOGETHER) + tensor("input", "ids", [1], "INT64"),
        (_looked_up(1, 2), _looked_up(10), _looked_up(3)),
        batches=((_looked_up(1, 2), _looked_up(3), _looked_up(4, 11), _looked_up(5)),),
    ),
    "strings": Case(
        Texts,
        lambda rows: (),
        config({}, {})
        + tensor("input", "texts", [1], "STRING")
        + tensor("output", "length", [1], "INT64")
        + tensor("output", "louder", [1], "STRING"),
        (
            Call(
                {"texts": np.array([["a"], ["bcd"], ["ef"]], dtype=np.object_)},
                {
                    "length": np.array([[1], [3], [2]]),
                    "louder": np.array([[b"a!"], [b"bcd!"], [b"ef!"]], dtype=np.object_),
                },
            ),
            Call(
                {"texts": np.array([[b"\xff"]], dtype=np.object_)},
                Refused(400, ("input 'texts' is not UTF-8",)),
            ),
            Call(
                {"texts": np.array([["z"]], dtype=np.object_)},
                {
                    "length": np.array([[1]]),
                    "louder": np.array([[b"z!"]], dtype=np.object_),
                },
            ),
        ),
        script_calls=(
            Call(
                {"texts": np.array([[b"\xff"], ["é"]], dtype=np.object_)},
                Refused(500, ("forward() raised UnicodeDecodeError",)),
            ),
            Call(
                {"texts": np.array([["z"]], dtype=np.object_)},
                {
                    "length": np.array([[1]]),
                    "louder": np.array([[b"z!"]], dtype=np.object_),
                },
            ),
        ),
        kinds=("torchscript", "module"),
    ),
}


# --- files -----------------------------------------------------------------------------------


def _program(case: Case) -> torch.export.ExportedProgram:
    module = _seeded(case.module)
    rows = case.fixed or 2
    args, kwargs = case.args(rows), case.kwargs(rows)
    if case.fixed:
        return torch.export.export(module, args, kwargs)
    batch = torch.export.Dim("batch", min=1, max=64)
    shapes = torch.utils._pytree.tree_map(lambda one: {0: batch}, (args, kwargs))
    names = [*Nested.forward.__code__.co_varnames[1:]] if case.kwargs(1) else None
    dynamic: Any = shapes[0]
    if names:
        dynamic = dict(zip(names, (*shapes[0], *shapes[1].values()), strict=False))
    return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic)


@functools.cache
def _exported(name: str) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(_program(CASES[name]), buffer)
    return buffer.getvalue()


def _write(kind: str, name: str) -> Writer:
    """Return a writer that makes the artifact when it is needed: exporting takes seconds."""

    def write(folder: Path) -> None:
        case = CASES[name]
        module = _seeded(case.module)
        if kind == "torchscript":
            scenarios.script(_seeded(case.scripted or case.module))(folder)
        elif kind == "export":
            (folder / "model.pt2").write_bytes(_exported(name))
        else:
            file = "model.py" if kind == "module" else f"factory_{name}.py"
            scenarios.python(case.module, name=file)(folder)
            if state := module.state_dict():
                scenarios.safe(state)(folder)

    return write


def _scenario(kind: str, name: str) -> Scenario:
    case = CASES[name]
    text, calls = case.config, case.calls
    if kind == "torchscript" and case.script_config is not None:
        text = case.script_config
        calls = (Call(_nested_values(_SCRIPT_INPUTS, "scale"), _SCRIPT_OUT),)
    if kind == "torchscript" and case.script_calls:
        calls = case.script_calls
    if kind == "factory":
        value = f"factory_{name}:{case.module.__name__}"
        text += f'parameters {{ key: "MODEL_FACTORY" value {{ string_value: "{value}" }} }}\n'
    return Scenario(f"{kind}_{name}", _write(kind, name), text, calls, batches=case.batches)


# --- configs that the model completes ----------------------------------------------------------

_BARE = 'backend: "pytorch_py"\ninstance_group [{ kind: KIND_CPU count: 1 }]\n'
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


def _option(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


# The refusals that a real server runs, too: what ends the process that completes a config.
COMPLETED = (
    Scenario(
        "complete_export_nested",
        _write("export", "nested"),
        _BARE,
        (
            Call(
                _nested_values(_NESTED_SHORT, "scale"),
                {"total": _TOTAL, "OUTPUT__1": _A, "OUTPUT__2": _B},
            ),
        ),
    ),
    Scenario(
        "complete_aoti",
        scenarios.both(
            _PACKAGE,
            _examples({"INPUT__0": torch.rand(2, 1, 8, 8)}),
        ),
        _BARE,
        tuple(_digits(rows) for rows in (1, 3, 8)),
    ),
    Scenario(
        "complete_torchscript",
        scenarios.both(_write("torchscript", "one"), _examples({"x": torch.rand(2, 4)})),
        _BARE,
        _ONE_NAMED,
    ),
    Scenario(
        "complete_strings",
        scenarios.text(models.source(Texts) + _EXAMPLE_TEXTS),
        _BARE,
        (
            Call(
                {"texts": np.array([["z"]], dtype=np.object_)},
                {
                    "OUTPUT__0": np.array([[1]]),
                    "OUTPUT__1": np.array([[b"z!"]], dtype=np.object_),
                },
            ),
        ),
    ),
    Scenario(
        "complete_outputs_only",
        scenarios.both(
            scenarios.text(models.source(One) + _EXAMPLE_FUNCTION),
            scenarios.safe(_ONE.state_dict()),
        ),
        _BARE + "max_batch_size: 8\n" + tensor("input", "x", [4]),
        _ONE_NAMED,
    ),
    scenarios.refused(
        "complete_without_examples",
        scenarios.python(One),
        _BARE + _option("WEIGHTS", "none"),
        "config.pbtxt lists no inputs, and",
        "expected example_inputs.safetensors",
    ),
    scenarios.refused(
        "complete_crashes",
        scenarios.text("import ctypes\n\nctypes.string_at(0)\n"),
        _BARE,
        "trying the model ended the process with SIGSEGV",
    ),
)


# Types that the artifact contradicts.
_WITHOUT_WARMUP = _option("WARMUP", "false")
_IMAGES = config({"INPUT__0": [1, 8, 8]}, {"OUTPUT__0": [10]})
CONTRADICTED = (
    scenarios.refused(
        "torchscript_of_strings",
        _write("torchscript", "one"),
        _ONE_CONFIG.replace("TYPE_FP32", "TYPE_STRING", 1) + _WITHOUT_WARMUP,
        "input 'x' is BYTES, and forward() takes a tensor",
    ),
    scenarios.refused(
        "aoti_of_integers",
        _PACKAGE,
        _IMAGES.replace("FP32", "INT32", 1) + _WITHOUT_WARMUP,
        "input 'INPUT__0' does not fit the compiled package: unmatched dtype",
    ),
)


TABLE = (
    *(_scenario(kind, name) for name, case in CASES.items() for kind in case.kinds),
    *COMPLETED,
    *CONTRADICTED,
)
