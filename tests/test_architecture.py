"""The borders of the house, as CONTRIBUTING.md draws them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import build
import pytest
import safetensors.torch
import torch

import torch_py_backend

_PACKAGE = Path(torch_py_backend.__file__).parent
_CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
_ROOMS = re.findall(r"^\| `(\w+)/?` \|", _CONTRIBUTING.read_text(), flags=re.MULTILINE)
# What Triton and the command line import when no model is loaded.
_WITHOUT_TORCH = _ROOMS[: _ROOMS.index("cli") + 1]
_LINEAR = """
from torch import nn

class Sum(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
"""


def _imports(path: Path) -> set[str]:
    """Our own rooms that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[0] == "torch_py_backend":
                found |= {parts[1]} if parts[1:] else {alias.name for alias in node.names}
    return found


def _files(room: str) -> list[Path]:
    folder = _PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [_PACKAGE / f"{room}.py"]


def test_every_room_is_in_the_table() -> None:
    """A module without a line in CONTRIBUTING.md has no place in the house."""
    present = {path.stem for path in _PACKAGE.glob("*.py")} - {"__init__"}
    present |= {path.parent.name for path in _PACKAGE.glob("*/__init__.py")}
    assert set(_ROOMS) == present


@pytest.mark.parametrize("room", _ROOMS)
def test_imports_run_one_way(room: str) -> None:
    """A room imports only rooms that stand before it in the table."""
    earlier = set(_ROOMS[: _ROOMS.index(room)]) | {room}
    for path in _files(room):
        assert _imports(path) <= earlier, path.name


@pytest.mark.parametrize("room", _ROOMS)
def test_only_the_adapter_touches_triton(room: str) -> None:
    """Triton's utilities are imported in one room."""
    named = [path for path in _files(room) if "import triton_python_backend" in path.read_text()]
    assert bool(named) == (room == "adapter")


@pytest.fixture(scope="module")
def light() -> list[str]:
    """The rooms that can be imported, one after the other, before torch is."""
    code = (
        "import importlib, sys\n"
        "for room in sys.argv[1:]:\n"
        "    importlib.import_module(f'torch_py_backend.{room}')\n"
        "    if 'torch' not in sys.modules: print(room)\n"
    )
    command = [sys.executable, "-c", code, *_WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("room", _WITHOUT_TORCH)
def test_without_torch(room: str, light: list[str]) -> None:
    """These rooms cost no import of torch."""
    assert room in light


@pytest.mark.parametrize("room", ["assembly", "warmup", "schema", "inspection"])
def test_without_the_compiler(room: str) -> None:
    """Inductor takes a second to import: only models that are compiled wait for it."""
    code = f"import sys, torch_py_backend.{room}; print('torch._inductor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_eager_model_starts_without_the_compiler(tmp_path: Path) -> None:
    """A module with weights is built, loaded, warmed up and run; torch.compile is not imported."""
    build.write(tmp_path, "model.py", _LINEAR)
    weights = {"weight": torch.ones(4, 4), "bias": torch.zeros(4)}
    (tmp_path / "1" / "model.safetensors").write_bytes(safetensors.torch.save(weights))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import build; from pathlib import Path;"
        "from torch_py_backend import assembly, threads, warmup; import torch;"
        "config = build.config(Path(sys.argv[2]));"
        "made = assembly.build(config, threads.budget(config)); warmup.run(made);"
        "(outcome,) = made.run([{'x': torch.ones(1, 4)}]);"
        "assert outcome['y'].tolist() == [[4] * 4], outcome;"
        "print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
