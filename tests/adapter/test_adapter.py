"""The adapter: checks before READY, the model that answers first, and profiles."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import importlib.util
import json
import locale
import logging
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_triton
import instances
import models
import numpy as np
import pytest
import scenarios
import torch
from instances import Served, logged, request
from scenarios import Scenario, Writer
from torch import Tensor, nn

from torch_py_backend import adapter
from torch_py_backend.adapter import PROFILED_BATCHES, TritonPythonModel, logs, messages
from torch_py_backend.config import threads
from torch_py_backend.engine import model_state
from torch_py_backend.processes import instance_status

pytestmark = pytest.mark.usefixtures("process")


def test_numpy_that_garbles_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_triton.Tensor, "as_numpy", lambda self: np.zeros(4, np.float32))
    with pytest.raises(fake_triton.TritonModelException, match=r"garbles tensors.*numpy<2"):
        instances.load(tmp_path, instances.named("function"))


_OWN = """
from pathlib import Path
from numpy import memmap
from safetensors.torch import load_file

OWN = load_file(Path(__file__).with_name("own.safetensors"))
SEEN = memmap(Path(__file__).with_name("seen.bin"), mode="w+", shape=4)
"""
_MAPS = scenarios.both(
    scenarios.text(models.source(models.Factor) + _OWN),
    scenarios.saved(models.Factor().state_dict()),
    scenarios.safe({"own": torch.ones(4)}, "own.safetensors"),
)
_FATAL = ["write model.pt", "truncate model.pt", "write own.safetensors"]
_OTHER = ["rename model.pt", "write model.py", "write seen.bin"]


@pytest.mark.parametrize("written", _FATAL + _OTHER)
def test_mapped_files_that_are_written_in_place(written: str, tmp_path: Path) -> None:
    """Requests get 503 with the file's name; a file that is replaced by renaming is no matter."""
    model = instances.load(tmp_path, Scenario("maps", _MAPS, scenarios.x_to_y()))
    change, name = written.split()
    path = tmp_path / "maps" / "1" / name
    if change == "rename":
        shutil.copyfile(path, path.with_name("new"))
        path.with_name("new").replace(path)
    else:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + 1 if change == "truncate" else None)
            file.seek(0, os.SEEK_END)
            file.write(b"\0")
    model._engine._looks_at = 0.0
    for _ in range(2):
        (response,) = model.execute([request(1)])
        error = response.error()
        assert (error is not None) == (written in _FATAL)
        if error is not None:
            assert error.code() == fake_triton.TritonError.UNAVAILABLE
            assert f"{name} was written in place" in error.message()
    assert len(logged()) == (written in _FATAL)
    model.finalize()


def test_without_a_warm_up_nothing_is_compiled(tmp_path: Path, dynamo: None) -> None:
    config = scenarios.x_to_y(WARMUP="false", TORCH_COMPILE_OPTIONAL_PARAMETERS="{}")
    model = instances.load(tmp_path, Scenario("net", scenarios.python(models.Negate), config))
    torch._dynamo.utils.counters.clear()
    assert model.execute([request(1)])[0].error() is None
    assert not torch._dynamo.utils.counters["frames"]


def test_python_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the Python of Triton's stub and the command that installs what it lacks."""
    find = importlib.util.find_spec
    hide = lambda name: None if name == "torch" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    python = re.escape(sys.executable)
    with pytest.raises(fake_triton.TritonModelException, match=f"{python} -m pip install torch"):
        instances.load(tmp_path, instances.named("function"))


def test_load_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervised instance reports what it loaded and each warning; the end removes the file."""
    status = tmp_path / "status"
    status.mkdir()
    monkeypatch.setenv(instance_status.VARIABLE, str(status))
    config = scenarios.x_to_y(NUM_THREADS="1", NUM_THREAD="1")
    model = instances.load(
        tmp_path, dataclasses.replace(instances.named("function"), config=config)
    )
    (path,) = instance_status.files(status)
    assert path.stem == str(os.getpid())
    reader = instance_status.Reader(path)
    assert reader.identity.model == "function"
    report = reader.report()
    assert [len(entry.pop("data")) for entry in report["request"]] == [4]
    assert report == {
        "artifact": "model.py: Python source and weights",
        "device": "cpu",
        "threads": [1, torch.get_num_interop_threads()],
        "weights": "0.0 MB of 0.0 MB shared by the instances",
        "options": {"NUM_THREADS": 1},
        "warnings": ["the parameter NUM_THREAD is unknown and ignored. Did you mean NUM_THREADS?"],
        "request": [{"name": "x", "datatype": "FP32", "shape": [1, 4]}],
    }
    model.finalize()
    assert list(status.iterdir()) == []


def test_the_locale_is_utf8(tmp_path: Path) -> None:
    """Triton's stub runs in the C locale, but a model may read UTF-8 files."""
    locale.setlocale(locale.LC_ALL, "C")
    instances.load(tmp_path, instances.named("function"))
    assert locale.nl_langinfo(locale.CODESET) == "UTF-8"


def test_logs_without_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message that Triton cannot receive any more goes to standard error."""
    logs.install("100%")
    monkeypatch.setattr(os, "getppid", lambda: -1)
    logging.getLogger("torch_py_backend").warning("late")
    assert capsys.readouterr().err == "model '100%': late\n"
    assert not fake_triton.Logger.lines


@pytest.mark.parametrize("name", ["other.pt2", "model.pt", "net"])
@pytest.mark.parametrize(
    ("member", "asked"),
    [("net/data/aotinductor/model/net.wrapper.so", False), ("net/models/model.json", True)],
)
def test_readiness_of_packages(
    name: str, member: str, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer servers do not ask models with AOTInductor packages, which hold the GIL in a call."""
    version = tmp_path / "1"
    (version / "folder").mkdir(parents=True)
    monkeypatch.setattr(fake_triton, "_model_dir", str(version))
    with zipfile.ZipFile(version / name, "w") as archive:
        archive.writestr(member, "")
    assert hasattr(TritonPythonModel(), "is_ready") is asked
    (tmp_path / "config.pbtxt").write_text(scenarios.option("OPTIMIZE", "aoti"))
    assert not hasattr(TritonPythonModel(), "is_ready")


def test_bfloat16_inputs_are_copied() -> None:
    """Triton's memory is invalid after execute()."""
    memory = torch.ones(4, dtype=torch.bfloat16)
    value = messages.read_tensor(fake_triton.Tensor.from_dlpack("x", memory))
    memory.fill_(7)
    assert value.tolist() == [1.0] * 4


def test_threads_are_reserved_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP reads its environment variables once, when torch is imported."""
    first = "torch_py_backend.adapter.answering"  # of the modules that import torch
    imported, reserve = [], threads.set_environment

    def watched(share: threads.Threads) -> None:
        imported.append(first in sys.modules)
        reserve(share)

    monkeypatch.delitem(sys.modules, first, raising=False)
    monkeypatch.delattr(adapter, "answering", raising=False)
    monkeypatch.setattr(threads, "set_environment", watched)
    config = scenarios.x_to_y(NUM_THREADS="3", NUM_INTEROP_THREADS="5")
    instances.load(tmp_path, dataclasses.replace(instances.named("function"), config=config))
    assert imported == [False]
    assert [os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]] == ["3", "3"]
    assert (torch.get_num_threads(), torch.get_num_interop_threads()) == (3, 5)


class _Profiled(Served):
    def __init__(self, folder: Path) -> None:
        self.traces = folder / "traces"
        self.traces.mkdir()
        config = scenarios.x_to_y(PROFILE_DIR=str(self.traces))
        super().__init__(folder, Scenario("m", scenarios.python(models.Negate), config))

    def repeat(self, times: int) -> None:
        for _ in range(times):
            (responses,) = self.send(request(1))
            assert all(response.error() is None for response in responses)


def test_the_first_batches_after_ready_are_profiled_except_one(tmp_path: Path) -> None:
    served = _Profiled(tmp_path)
    served.repeat(PROFILED_BATCHES)
    assert list(served.traces.iterdir()) == []
    served.repeat(3)
    (path,) = served.traces.iterdir()
    served.model.finalize()
    assert list(served.traces.iterdir()) == [path]
    assert path.name.startswith("m_0_0-1.")  # the instance, and its version
    with gzip.open(path) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    steps = [name for name in names if name.startswith("ProfilerStep#")]
    assert len(steps) == names.count("aten::neg") == PROFILED_BATCHES


def test_unloading_ends_the_profile(tmp_path: Path) -> None:
    served = _Profiled(tmp_path)
    served.model.finalize()
    assert list(served.traces.iterdir()) == []
    assert not torch._C._autograd._profiler_enabled()


def test_a_trace_that_cannot_be_written_costs_the_trace_only(tmp_path: Path) -> None:
    served = _Profiled(tmp_path)
    served.traces.rmdir()
    served.traces.touch()
    served.repeat(PROFILED_BATCHES + 3)
    assert sum("the profiler failed" in line for line in logged("warn")) == 1


class Buffers(nn.Module):
    count: Tensor
    replaced: Tensor
    sparse: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(4), persistent=False)
        self.register_buffer("sparse", torch.eye(4).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result = x + self.count + self.replaced + self.sparse.to_dense().sum(0)
        self.count += 1
        self.sparse.mul_(2)
        self.replaced = self.replaced + x.sum()
        return result


class Attributes(nn.Module):
    part: Any

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()
        self.part.calls, self.part.seen = 0, []
        self.total = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.part.calls += 1
        self.part.seen.append(x)
        self.total += 1
        result: Tensor = x + self.part.calls + len(self.part.seen) + self.total
        return result


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        return x + self.total


class Recomputes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # It computes `weight`, an attribute, before each call.
        self.head = torch.nn.utils.weight_norm(nn.Linear(4, 4))
        self.shape, self.device = torch.Size([4]), torch.device("cpu")

    @functools.cached_property
    def scale(self) -> float:
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.shape, self.device = x.shape[1:], x.device
        result: Tensor = self.head(x) * self.scale
        return result


def _python(module: nn.Module) -> Writer:
    source = "import functools\nfrom typing import Any\n" + models.source(type(module))
    return scenarios.both(scenarios.text(source), scenarios.safe(module.state_dict()))


def _served(folder: Path, write: Writer, **parameters: str) -> TritonPythonModel:
    model = TritonPythonModel()
    scenario = Scenario("digits", write, scenarios.x_to_y(4, **parameters))
    model.initialize(fake_triton.arguments(scenario.lay_out(folder)))
    return model


def _compare(model: TritonPythonModel, fresh: Callable[[Tensor], Tensor]) -> None:
    for rows in (1, 3, 2):
        (response,) = model.execute([request(rows, rows=rows)])
        assert response.error() is None
        (tensor,) = response.output_tensors()
        with torch.no_grad():
            expected = fresh(torch.full((rows, 4), float(rows)))
        np.testing.assert_allclose(tensor.as_numpy(), expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "scripted"), [(Buffers, False), (Recomputes, False), (Sums, True)]
)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_buffers_are_put_back_and_caches_stay(
    make: Callable[[], nn.Module], scripted: bool, tmp_path: Path
) -> None:
    module = make().eval()
    if scripted:
        module.register_buffer("total", module.__dict__.pop("total"))
    model = _served(tmp_path, scenarios.script(module) if scripted else _python(module))
    assert not logged("warn")
    _compare(model, module)


@pytest.mark.parametrize(
    ("make", "names"),
    [(Attributes, ["part.calls", "part.seen", "total"]), (Buffers, ["count", "replaced"])],
)
def test_models_with_other_state_are_built_again(
    make: Callable[[], nn.Module], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_state, "_COPIED_BYTES", 8)  # larger buffers may as well be weights
    model = _served(tmp_path, _python(make()))
    (warning,) = logged("warn")
    assert "is built again without a warm-up" in warning
    assert all(name in warning for name in names)
    assert sum("the warm-up begins" in line for line in logged("info")) == 1
    _compare(model, make())


def test_a_compiled_model_that_is_built_again_uses_its_graphs(tmp_path: Path) -> None:
    compiles = '{"backend": "aot_eager"}'
    write = scenarios.python(Sums)
    model = _served(tmp_path, write, WEIGHTS="none", TORCH_COMPILE_OPTIONAL_PARAMETERS=compiles)
    assert "built again" in logged("warn")[0]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    _compare(model, Sums())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert model._engine.counts.eager_calls == 0
