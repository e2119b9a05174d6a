"""Fixtures for tests that load models in their own process; `conftest.py` offers them."""

from __future__ import annotations

import gc
import importlib
import json
import locale
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import fake_triton
import pytest
import torch

from torch_py_backend.errors import BackendError, LoadError
from torch_py_backend.processes import child_process

# The adapter imports Triton's utilities, which exist only inside Triton's stub.
sys.modules.setdefault("triton_python_backend_utils", fake_triton)

from torch_py_backend import adapter, composition  # noqa: E402  after the fake


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is in no cycle is freed at once; what is in one stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def imports(tmp_path: Path) -> Iterator[None]:
    """Removes the modules of the test's models, and restores sys.path."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def dynamo() -> Iterator[None]:
    """What a compiled model changes of torch.compile's settings is put back afterwards."""
    settings = torch._dynamo.config
    limits = settings.recompile_limit, settings.accumulated_recompile_limit
    yield
    settings.recompile_limit, settings.accumulated_recompile_limit = limits
    torch._inductor.config.freezing = False
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, dynamo: None) -> Iterator[None]:
    """A process that a model may settle in: what it changes is put back afterwards."""
    fake_triton.Logger.lines.clear()
    fake_triton.MetricFamily.made.clear()
    fake_triton.MetricFamily.kinds.clear()
    # What a test has made may be collected after it; to look at all objects takes 0.1 s a load.
    monkeypatch.setattr(adapter, "gc", mock.Mock())
    # torch takes this call once in a process; every test is one.
    interop = {"threads": torch.get_num_interop_threads()}
    monkeypatch.setattr(torch, "get_num_interop_threads", lambda: interop["threads"])
    monkeypatch.setattr(
        torch, "set_num_interop_threads", lambda count: interop.update(threads=count)
    )
    # As Triton, which ends every model that was started.
    started: list[adapter.TritonPythonModel] = []
    start = adapter.TritonPythonModel.initialize

    def initialize(model: adapter.TritonPythonModel, args: Mapping[str, str]) -> None:
        started.append(model)
        start(model, args)

    monkeypatch.setattr(adapter.TritonPythonModel, "initialize", initialize)
    monkeypatch.setattr(composition, "send", composition.send)
    package = logging.getLogger("torch_py_backend")
    monkeypatch.setattr(package, "handlers", [*package.handlers])
    monkeypatch.setattr(package, "propagate", package.propagate)
    monkeypatch.setattr(sys, "path", [*sys.path])
    level, language = package.level, locale.setlocale(locale.LC_ALL)
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn.enabled
    fuser = torch._C._jit_texpr_fuser_enabled()
    with mock.patch.dict(os.environ):
        yield
        for model in reversed(started):  # inference modes nest
            model.finalize()
    locale.setlocale(locale.LC_ALL, language)
    torch.set_num_threads(threads)
    torch.backends.cudnn.enabled = cudnn
    torch._C._jit_set_texpr_fuser_enabled(fuser)
    torch._C._jit_set_profiling_executor(True)
    torch._C._jit_set_profiling_mode(True)
    torch._C._set_graph_executor_optimize(True)
    package.setLevel(level)


def run_here(task: str, arguments: Mapping[str, Any], *rest: object, **_: object) -> Any:
    """Run a task of `child_process.run` in this process, which need not import torch again."""
    module, function = task.split(":")
    path, modules = list(sys.path), set(sys.modules)
    try:
        sent = json.loads(json.dumps(arguments))
        result = getattr(importlib.import_module(module), function)(**sent)
        return json.loads(json.dumps(result))
    except BackendError as error:
        refusal = LoadError(str(error))
        refusal.traceback = error.traceback or traceback.format_exc()
        raise refusal from None
    finally:
        sys.path[:] = path
        folder = str(arguments["arguments"]["model_repository"])
        for name in sys.modules.keys() - modules:  # torch cannot be imported twice
            if str(getattr(sys.modules[name], "__file__", None)).startswith(folder):
                del sys.modules[name]


@pytest.fixture
def here(process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that a child process would try, as a config is completed, are loaded in this one."""
    monkeypatch.setattr(child_process, "run", run_here)
