"""`SourceWriter`: a model.py for classes of a script, a notebook or a module."""

from __future__ import annotations

import contextlib
import linecache
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from torch_py_backend.errors import SaveError
from torch_py_backend.saving.source_writer import SourceWriter

_SCRIPT = """
import functools
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4
TABLE = torch.ones(WIDTH)
x = torch.ones(WIDTH)


def double(value):
    return 2 * value


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.block = Block(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return double(self.block(x))


class UsesTensor(nn.Module):
    def forward(self, x):
        return x + TABLE


def local():
    class Local(nn.Module):
        def forward(self, x):
            return x

    return Local


raise RuntimeError("the rest of a script is not run again")
"""
Main = Callable[[str, str], dict[str, Any]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    """Run a text as the script of this process, until it raises."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)

    def run(text: str, file: str) -> dict[str, Any]:
        with contextlib.suppress(RuntimeError):
            exec(compile(text, file, "exec"), vars(module))
        return vars(module)

    return run


def _written(name: str, values: list[Any], folder: Path) -> dict[str, Any]:
    """Run the file that is written for objects, without the script."""
    writer = SourceWriter("net")
    for value in values:
        writer.add(value)
    scope: dict[str, Any] = {"__name__": name}
    exec(compile(writer.text(), str(folder / "model.py"), "exec"), scope)
    return scope


@pytest.mark.parametrize("notebook", [False, True])
def test_class_of_a_script(notebook: bool, main: Main, tmp_path: Path) -> None:
    """A class is written with what it uses; locals are not taken for globals of that name."""
    if notebook:
        file = "<ipython-input-1-a>"
        lines = _SCRIPT.splitlines(keepends=True)
        linecache.cache[file] = (len(_SCRIPT), None, lines, file)
    else:
        file = str(tmp_path / "script.py")
        Path(file).write_text(_SCRIPT)
    scope = main(_SCRIPT, file)
    written = _written("model", [scope["Net"]], tmp_path)
    module, again = scope["Net"](), written["Net"]()
    again.load_state_dict(module.state_dict())
    inputs = torch.rand(2, 4)
    assert torch.equal(again(inputs), module(inputs))
    assert "TABLE" not in written
    assert "x" not in written


def test_path_of_a_script(main: Main, tmp_path: Path) -> None:
    """Files beside the script, which are not saved, are not read from this machine's path."""
    path = tmp_path / "script.py"
    path.write_text("class Net:\n    def labels(self):\n        return open(__file__ + '.txt')\n")
    scope = main(path.read_text(), str(path))
    scope["__file__"] = str(path)
    assert "__file__" not in _written("model", [scope["Net"]], tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("UsesTensor", "UsesTensor uses 'TABLE', a Tensor of the script"),
        ("Local", "local.<locals>.Local is defined inside a function"),
    ],
)
def test_class_that_cannot_be_written(name: str, says: str, main: Main, tmp_path: Path) -> None:
    """A class that depends on more than a file can hold is refused."""
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    scope = main(_SCRIPT, str(path))
    with pytest.raises(SaveError, match=says):
        SourceWriter("net").add(scope["local"]() if name == "Local" else scope[name])


def test_class_without_source(main: Main) -> None:
    """A class from standard input has no source; the message says what to do."""
    scope = main(_SCRIPT, "<stdin>")
    says = r"the source of Net is not in a file or a notebook but in <stdin>\. Put the class into"
    with pytest.raises(SaveError, match=says):
        SourceWriter("net").add(scope["Net"])


def test_class_of_a_module(main: Main, tmp_path: Path) -> None:
    """A class of a file is imported from a copy of it, one of a package is only imported."""
    writer = SourceWriter("net")
    writer.add(models.Affine)
    writer.add(torch.nn.Linear)
    assert writer.files == {"models.py": Path(models.__file__)}
    assert writer.text() == (
        "from models import Affine\nfrom torch.nn.modules.linear import Linear\n"
    )


@pytest.mark.parametrize("name", ["model", "own.nets"])
def test_class_of_a_local_package(
    name: str, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package is taken as a whole; the user's own model.py becomes the model.py."""
    source = "import helper\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    pass\n"
    for file, text in (
        ("model.py", source),
        ("own/__init__.py", ""),
        ("own/nets.py", source),
        ("own/labels.txt", "a"),
        ("helper.py", ""),
    ):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("model", "own", "own.nets", "helper"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    cls = __import__(name, fromlist=["Net"]).Net
    writer = SourceWriter("net")
    writer.add(cls)
    text = writer.text()
    if name == "model":
        assert (text.rstrip() + "\n", set(writer.files)) == (source, {"helper.py"})
    else:
        assert text == "from own.nets import Net\n"
        assert set(writer.files) == {
            "own/__init__.py", "own/nets.py", "own/labels.txt", "helper.py",
        }  # fmt: skip
    for module in ("model", "own", "own.nets", "helper"):
        sys.modules.pop(module, None)
