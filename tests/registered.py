"""Artifacts that need operators or classes that a package registers: a table of scenarios."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import scenarios
import torch
from scenarios import Call, Scenario, config, floats
from torch import nn
from torch.utils import _pytree as pytree

# The package NAME: an operator `double`, and a class `Pair` of two tensors.
_PACKAGE = """
import dataclasses

import torch

library = torch.library.Library("NAME", "FRAGMENT")
library.define("double(Tensor x) -> Tensor")
library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
torch.library.register_fake("NAME::double", torch.empty_like, lib=library)


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


torch.export.register_dataclass(Pair, serialized_type_name="NAME.Pair")
"""
_HOOKS = """
import NAME


class Hooks:
    def postprocess_batch(self, result):
        return vars(result)
"""
_X = floats(2, 4)
_X_TO_Y = config({"x": [4]}, {"y": [4]})
_Save = Callable[[Any, Path], None]


def _trace(package: Any, path: Path) -> None:
    double = getattr(torch.ops, package.__name__).double
    traced = torch.jit.trace(lambda x: double(x) + 1, torch.rand(2, 4))
    torch.jit.save(traced, str(path.with_suffix(".pt")))


def _export(package: Any, path: Path) -> None:
    operators = getattr(torch.ops, package.__name__)

    class Swaps(nn.Module):
        def forward(self, pair: Any) -> Any:
            return package.Pair(operators.double(pair.second), pair.first + 1)

    pair = package.Pair(torch.rand(2, 4), torch.rand(2, 4))
    batch = {0: torch.export.Dim("batch", min=1, max=8)}
    program = torch.export.export(Swaps(), (pair,), dynamic_shapes={"pair": [batch, batch]})
    torch.export.save(program, path)


def _scenario(
    name: str, save: _Save, source: str | None, *calls: Call, text: str = _X_TO_Y, **more: Any
) -> Scenario:
    """Return a model whose package, of its own name, lies beside it; `source` imports it.

    The package is not registered in this process any more when the artifact is written.
    """

    def write(folder: Path) -> None:
        (folder / f"{name}.py").write_text(_PACKAGE.replace("NAME", name))
        if source is not None:
            file = "hooks.py" if "class Hooks" in source else "model.py"
            (folder / file).write_text(source.replace("NAME", name))
        sys.path.insert(0, str(folder))
        package = importlib.import_module(name)
        try:
            save(package, folder / "model.pt2")
        finally:
            sys.path.remove(str(folder))
            del sys.modules[name]
            package.library._destroy()
            pytree._deregister_pytree_node(package.Pair)

    return Scenario(name, write, text, calls, **more)


_IMPORT = "import its package in model.py"
TABLE = (
    _scenario(
        "operator_of_torchscript", _trace, "import NAME\n", Call({"x": _X}, {"y": 2 * _X + 1})
    ),
    # hooks.py registers them, and Triton names the artifact.
    _scenario(
        "operator_and_class_of_program",
        _export,
        _HOOKS,
        Call({"first": _X, "second": -_X}, {"first": -2 * _X, "second": _X + 1}),
        text=config({"first": [4], "second": [4]}, {"first": [4], "second": [4]})
        + 'default_model_filename: "model.pt2"\n',
    ),
    _scenario("unknown_operator", _trace, None, load_error=("::double. ", _IMPORT)),
    _scenario(
        "unknown_class", _export, None, load_error=("No module named 'unknown_class'", _IMPORT)
    ),
    # Where the artifact can be loaded, a file that fails may have nothing to do with it.
    Scenario(
        "failing_import_of_another",
        scenarios.both(
            scenarios.script(models.Negate()), scenarios.text("import missing_package\n")
        ),
        _X_TO_Y + 'default_model_filename: "model.pt"\n',
        (Call({"x": _X}, {"y": -_X}),),
        logs=("model.py fails at line 1", "model.pt is loaded without it"),
    ),
)
