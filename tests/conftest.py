"""Fixtures that the whole suite shares."""

from __future__ import annotations

import gc
import locale
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import children
import fake_triton
import hypothesis
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

# The adapter imports Triton's utilities, which exist only inside Triton's stub.
sys.modules.setdefault("triton_python_backend_utils", fake_triton)

from torch_py_backend import composition  # noqa: E402  after the fake
from torch_py_backend.adapter import TritonPythonModel  # noqa: E402
from torch_py_backend.processes import server_folder  # noqa: E402  after the fake

# The same examples in every run, no time limit of its own: pytest's ends what hangs.
hypothesis.settings.register_profile(
    "suite", derandomize=True, deadline=None, database=None, max_examples=150
)
hypothesis.settings.load_profile("suite")

# In tests/live/: those that wait rather than compute.
_COMMANDS = (
    "faults/",
    "test_bench",
    "test_serve",
)


class _Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """Whole files. Those with real servers in two processes: one for commands that start them.

    Each in turn: the models of more servers would not fit into a small machine's memory.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        _, folder, name = file.rpartition("tests/live/")
        if not folder:
            return file
        return "commands" if name.startswith(_COMMANDS) else "servers"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """What hands out the tests where there are several processes (`make test`)."""
    return _Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def server_of_its_own() -> Iterator[None]:
    """Give each process its own server folder: all processes of a run have the same parent."""
    name = server_folder.server_name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_folder, "server_name", lambda _parent: f"{name(os.getpid())}-itself")
        yield


@pytest.fixture(scope="module", autouse=True)
def young_objects() -> None:
    """Collections look at what this file's tests make, not at all that was ever imported.

    A model collects as it starts, and a look at a million objects takes half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is in no cycle is freed at once; what is in one stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[children.Start]:
    """Starts processes that use the test's temporary folder, and ends them after it."""
    with children.starting(tmp_path) as start:
        yield start


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
    # What a test has made may be collected after it.
    monkeypatch.setattr(gc, "freeze", lambda: None)
    # torch takes this call once in a process; every test is one.
    interop = {"threads": torch.get_num_interop_threads()}
    monkeypatch.setattr(torch, "get_num_interop_threads", lambda: interop["threads"])
    monkeypatch.setattr(
        torch, "set_num_interop_threads", lambda count: interop.update(threads=count)
    )
    # As Triton, which ends every model that was started.
    started: list[TritonPythonModel] = []
    start = TritonPythonModel.initialize

    def initialize(model: TritonPythonModel, args: Mapping[str, str]) -> None:
        started.append(model)
        start(model, args)

    monkeypatch.setattr(TritonPythonModel, "initialize", initialize)
    monkeypatch.setattr(composition, "_transport", composition._transport)
    package = logging.getLogger("torch_py_backend")
    before = (
        dict(os.environ),
        locale.setlocale(locale.LC_ALL),
        torch.get_num_threads(),
        torch.backends.cudnn.enabled,
        torch._C._jit_texpr_fuser_enabled(),
        list(sys.path),
        (list(package.handlers), package.propagate, package.level),
    )
    yield
    for model in reversed(started):  # inference modes nest
        model.close()
    environment, language, threads, cudnn, fuser, path, logger = before
    os.environ.clear()
    os.environ.update(environment)
    locale.setlocale(locale.LC_ALL, language)
    torch.set_num_threads(threads)
    torch.backends.cudnn.enabled = cudnn
    torch._C._jit_set_texpr_fuser_enabled(fuser)
    torch._C._jit_set_profiling_executor(True)
    torch._C._jit_set_profiling_mode(True)
    torch._C._set_graph_executor_optimize(True)
    sys.path[:] = path
    package.handlers, package.propagate = logger[0], logger[1]
    package.setLevel(logger[2])
