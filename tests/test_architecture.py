"""What must not be imported; `lint-imports` checks the layers and the other borders."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import build
import children
import models
import pytest
import safetensors.torch
import torch

import torch_py_backend
from torch_py_backend.config import threads
from torch_py_backend.engine import load, warmup

_PACKAGE = Path(torch_py_backend.__file__).parent
# Imported by Triton and the command line when no model is loaded.
_WITHOUT_TORCH = ("config", "processes", "server", "cli", "adapter")


def _modules(package: str) -> list[str]:
    name = f"torch_py_backend.{package}"
    if package == "adapter":  # its modules are imported once torch is
        return [name]
    return [name, *(f"{name}.{one.name}" for one in pkgutil.iter_modules([_PACKAGE / package]))]


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
    names = [name for part in _WITHOUT_TORCH for name in _modules(part)]
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, check=False
    )
    assert done.stdout == advice, done.stderr
    assert done.returncode == 0, done.stderr
    assert torch_py_backend.save_model.__module__ == "torch_py_backend.saving.save_model"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        torch_py_backend.nothing  # noqa: B018


# The compiler, and what only the command line and optional features need.
_NOT_NEEDED = ("torch._dynamo", "sympy", "psutil", "grpc", "uvicorn", "rich", "typer", "PIL")


def _run(folder: Path) -> list[str]:
    """Run a module, and return what is imported that it does not need."""
    options = {"model_factory": "build_sum", "model_kwargs": {"width": 4}}
    config = build.config(folder, outputs=(build.spec("y", dims=(1,)),), **options)
    engine = load.build(config, threads.budget(config))
    warmup.run(engine)
    (outcome,) = engine.run([{"x": torch.ones(1, 4)}])
    assert outcome["y"].tolist() == [[4]]
    imported = [name for name in _NOT_NEEDED if name in sys.modules]
    for name in ("autocomplete.schema", "saving.save_model", "model_folders.inspection"):
        importlib.import_module(f"torch_py_backend.{name}")
    # It takes a second to import: only models that are compiled wait for it.
    return imported + [name for name in ("torch._inductor",) if name in sys.modules]


def test_a_module_is_loaded_and_run_with_the_wheels_own_requirements(tmp_path: Path) -> None:
    build.write(tmp_path, "model.py", models.source(models.build_sum))
    weights = safetensors.torch.save({"weight": torch.ones(1, 4)})
    build.write(tmp_path, "model.safetensors", weights)
    assert children.call(_run, tmp_path) == []
