"""What must not be imported; `lint-imports` checks the layers and the other borders."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import build
import pytest
import safetensors.torch
import torch

import torch_py_backend

_PACKAGE = Path(torch_py_backend.__file__).parent
# Imported by Triton and the command line when no model is loaded.
_WITHOUT_TORCH = ("config", "processes", "server", "cli", "adapter")
_LINEAR = """
from torch import nn

class Sum(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
"""


def _modules(package: str) -> list[str]:
    name = f"torch_py_backend.{package}"
    if package == "adapter":  # its modules are imported once torch is
        return [name]
    return [name, *(f"{name}.{one.name}" for one in pkgutil.iter_modules([_PACKAGE / package]))]


def _prints(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_completion_commands_and_supervisor_do_not_import_torch() -> None:
    """The package's names are there without numpy or a client, too."""
    code = (
        "import importlib, sys, torch_py_backend as package\n"
        "heavy = {'torch', 'numpy', 'tritonclient', 'grpc', 'psutil',"
        " 'torch_py_backend.model_folders'}\n"
        "assert set(package.__all__) <= set(dir(package))\n"
        "assert not heavy & set(sys.modules)\n"
        "sys.modules['psutil'] = None\n"
        "try: package.serve\n"
        "except ImportError as error: print(error)\n"
        "del sys.modules['psutil']\n"
        "package.serve, package.LocalServer\n"
        "sys.modules['triton_python_backend_utils'] = sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    advice = "torch_py_backend.serve needs psutil: pip install 'torch-py-backend[server]'.\n"
    assert _prints(code, *(name for part in _WITHOUT_TORCH for name in _modules(part))) == advice
    assert torch_py_backend.save_model.__module__ == "torch_py_backend.saving.save_model"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        torch_py_backend.nothing  # noqa: B018


# The compiler, and what only the command line and optional features need.
_NOT_NEEDED = ("torch._dynamo", "sympy", "psutil", "grpc", "uvicorn", "rich", "typer", "PIL")


def test_what_an_eager_model_does_not_import(tmp_path: Path) -> None:
    """A module is loaded, warmed up and run with the wheel's own requirements alone."""
    build.write(tmp_path, "model.py", _LINEAR)
    weights = {"weight": torch.ones(4, 4), "bias": torch.zeros(4)}
    (tmp_path / "1" / "model.safetensors").write_bytes(safetensors.torch.save(weights))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import build; from pathlib import Path;"
        "from torch_py_backend.config import threads;"
        "from torch_py_backend.engine import load, warmup; import torch;"
        "config = build.config(Path(sys.argv[2]));"
        "made = load.build(config, threads.budget(config)); warmup.run(made);"
        "(outcome,) = made.run([{'x': torch.ones(1, 4)}]);"
        "assert outcome['y'].tolist() == [[4] * 4], outcome;"
        "print([name for name in sys.argv[3:] if name in sys.modules]);"
        "import torch_py_backend.autocomplete.schema, torch_py_backend.saving.save_model;"
        "import torch_py_backend.model_folders.inspection;"
        # It takes a second to import: only models that are compiled wait for it.
        "assert 'torch._inductor' not in sys.modules"
    )
    told = _prints(code, str(Path(__file__).parent), str(tmp_path), *_NOT_NEEDED)
    assert told.strip() == "[]"
