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
from scenarios import BARE, Call, Scenario, Writer, config, floats, option
from torch import Tensor, nn
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
import torch


class Hooks:
    def postprocess_batch(self, result):
        return {"y": result}
"""
_HELPER = """

def helper(x):
    return x
"""
_X = floats(2, 4)
_BATCH = {0: torch.export.Dim("batch", min=1, max=8)}
_X_TO_Y = config({"x": [4]}, {"y": [4]})
_Save = Callable[[Any, Path], None]


def _doubles(package: Any) -> nn.Module:
    operator = getattr(torch.ops, package.__name__).double

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = operator(x) + 1
            return result

    return Doubles()


def _trace(package: Any, path: Path) -> None:
    torch.jit.trace(_doubles(package), torch.rand(2, 4)).save(path.with_suffix(".pt"))


def _export(package: Any, path: Path) -> None:
    program = torch.export.export(
        _doubles(package), (torch.rand(2, 4),), dynamic_shapes={"x": _BATCH}
    )
    torch.export.save(program, path)


def _export_classes(package: Any, path: Path) -> None:
    class Swaps(nn.Module):
        def forward(self, pair: Any) -> Any:
            return package.Pair(pair.second, pair.first + 1)

    pair = package.Pair(torch.rand(2, 4), torch.rand(2, 4))
    program = torch.export.export(Swaps(), (pair,), dynamic_shapes={"pair": [_BATCH, _BATCH]})
    torch.export.save(program, path)


_package: list[bytes] = []


def _compile(package: Any, path: Path) -> None:
    """Write a package with the operator, a tree of inputs of two rows and the class, made once."""
    if _package:
        path.write_bytes(_package[0])
        return
    doubles = _doubles(package)

    class Both(nn.Module):
        def forward(self, x: Tensor, extra: dict[str, Any], *, scale: Tensor) -> Any:
            return package.Pair(doubles(x), (extra["z"] - extra["a"][0]) * scale)

    def tensor() -> Tensor:
        return torch.rand(2, 4)

    args, kwargs = (tensor(), {"z": tensor(), "a": [tensor()]}), {"scale": tensor()}
    program = torch.export.export(Both(), args, kwargs)
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    _package.append(path.read_bytes())


def write(name: str, save: _Save, source: str | None) -> Writer:
    """Return the writer of an artifact, the package `name` beside it, and a source file.

    The package is not registered in this process any more when the artifact is written.
    """

    def write(folder: Path) -> None:
        (folder / f"{name}.py").write_text(_PACKAGE.replace("NAME", name))
        if source is not None:
            (folder / ("hooks.py" if "class Hooks" in source else "model.py")).write_text(source)
        sys.path.insert(0, str(folder))
        package = importlib.import_module(name)
        try:
            save(package, folder / "model.pt2")
        finally:
            sys.path.remove(str(folder))
            del sys.modules[name]
            package.library._destroy()
            pytree._deregister_pytree_node(package.Pair)

    return write


_NESTED = ("KWARGS[scale]", "ARGS[1][a][0]", "ARGS[0]", "ARGS[1][z]")
_DOUBLED = Call({"x": _X}, {"y": 2 * _X + 1})


def _both(rows: int) -> Call:
    scale, a, x, z = (floats(rows, 4, seed=seed) for seed in range(4))
    inputs = dict(zip(_NESTED, (scale, a, x, z), strict=True))
    return Call(inputs, {"first": 2 * x + 1, "second": (z - a) * scale})


def _scenario(name: str, save: _Save, source: str | None, *calls: Call, **more: Any) -> Scenario:
    written = source and source.replace("NAME", name)
    return Scenario(name, write(name, save, written), **{"config": _X_TO_Y, "calls": calls, **more})


_IMPORT = "import its package in model.py"
TABLE = (
    _scenario("operator_of_torchscript", _trace, "import NAME\n" + _HELPER, _DOUBLED),
    # Before the row that registers the same operator in this process.
    Scenario(
        "unknown_operator_of_package",
        write("operator_and_class_of_package", _compile, None),
        _X_TO_Y,
        load_error=("::double. ", _IMPORT),
    ),
    _scenario(
        "operator_and_class_of_package",
        _compile,
        "import NAME\n",
        *(_both(rows) for rows in (2, 1, 3, 8)),
        config=config({name: [4] for name in _NESTED}, {"first": [4], "second": [4]})
        + option("BATCH_BUCKETS", "2"),
    ),
    # hooks.py registers it, and Triton names the artifact.
    _scenario(
        "operator_of_program",
        _export,
        "import NAME\n" + _HOOKS,
        _DOUBLED,
        config=_X_TO_Y + 'default_model_filename: "model.pt2"\n',
    ),
    _scenario(
        "class_of_program",
        _export_classes,
        "from NAME import Pair\n",
        Call({"first": _X, "second": -_X}, {"first": -_X, "second": _X + 1}),
        config=BARE,
    ),
    _scenario(
        "unknown_operator_of_torchscript",
        _trace,
        None,
        load_error=("operator_of_torchscript::double. ", _IMPORT),
    ),
    _scenario(
        "unknown_class",
        _export_classes,
        None,
        load_error=("No module named 'unknown_class'", _IMPORT),
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
