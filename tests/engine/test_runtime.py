"""The runtime: the device, memory and copies; the switches: rows `settings_` of scenarios."""

import ctypes
import os
import resource
from typing import Any
from unittest import mock

import build
import children
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_py_backend.config.options import Options
from torch_py_backend.config.threads import Threads
from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import PlatformError
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature import introspection

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(("value", "expected"), [("high", "high"), (None, "medium")])
def test_matmul_precision(value: str | None, expected: str) -> None:
    options = Options(float32_matmul_precision=value)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        runtime.set_switches(options, Threads(1, torch.get_num_interop_threads()))
        assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)


def _faults() -> int:
    """Return the page faults of twenty batches after the first ones."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.prctl(41, 1, 0, 0, 0)  # no huge pages, one of which hides 511 faults
    for name in [name for name in os.environ if "MALLOC" in name]:
        del os.environ[name]
    runtime.keep_freed_memory()

    def batch() -> None:
        parts = [libc.malloc(ctypes.c_size_t(_PART)) for _ in range(10)]
        for part in parts:
            ctypes.memset(part, 1, _PART)
        for part in reversed(parts):  # the last one is beside memory that malloc can return
            libc.free(ctypes.c_void_p(part))

    for _ in range(5):
        batch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        batch()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


_PART = 4 << 20


def test_freed_memory_is_kept() -> None:
    assert children.call(_faults) < 10 * _PART // 4096  # the pages of one batch


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """GPUs are visible; what is done to them."""
    done: list[Any] = []
    one = torch.ones(1)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: one)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    limit = "set_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, limit, lambda *limits: done.append(limits))
    return done


@pytest.mark.parametrize("fraction", [None, 0.25])
def test_an_instance_has_its_gpu_and_its_part_of_the_memory(
    fraction: float | None, done: list[Any]
) -> None:
    device = runtime.placement(build.config(kind="GPU", device_id=1, cuda_memory_fraction=fraction))
    assert device == torch.device("cuda", 1)
    assert done == [device] + [(fraction, device)] * (fraction is not None)


@pytest.mark.usefixtures("done")
@pytest.mark.parametrize(
    ("module", "function", "reason"),
    [
        (torch.cuda, "init", "The NVIDIA driver on your system is too old"),
        (torch.cuda, "set_device", "CUDA error: invalid device ordinal"),
        (torch, "ones", "CUDA error: no kernel image is available"),
    ],
)
def test_a_gpu_that_torch_cannot_use_fails_the_load(
    module: Any, function: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, function, mock.Mock(side_effect=RuntimeError(reason)))
    with pytest.raises(PlatformError, match=rf"GPU 1.* \(RuntimeError: {reason}\).*KIND_CPU"):
        runtime.placement(build.config(kind="GPU", device_id=1))


@pytest.mark.parametrize(
    ("device", "weights", "expected"),
    [
        (CPU, [torch.ones(1, device=META)], CPU),
        (None, [torch.ones(1, device=META), torch.ones(1)], META),
        (None, [], CPU),
    ],
    ids=["given", "weights'", "no weights"],
)
def test_inputs_go_to_the_model(
    device: torch.device | None, weights: list[Tensor], expected: torch.device
) -> None:
    """A model that places itself gets its inputs on the device of its first weight."""
    module = nn.Module()
    for number, weight in enumerate(weights):
        module.register_buffer(str(number), weight)
    engine = _engine(device, module, enable_cache_cleaning=True)
    (column,) = engine.to_device([torch.ones(2, 3)])
    assert engine.device == torch.as_tensor(column).device == expected
    assert engine.on_cpu is (expected == CPU)
    assert not engine._cleans, "there is no CUDA cache"


def _engine(device: torch.device | None, owner: nn.Module | None = None, **options: Any) -> Engine:
    signature = introspection.from_function(lambda x: x)
    loaded = Loaded(build.artifact(), lambda x: x, signature, owner)
    return Engine(build.config(**options), loaded, device)


def test_inputs_that_triton_leaves_on_the_gpu_come_to_a_model_on_the_cpu() -> None:
    """Triton uses the parameter and not the instance's kind."""
    engine = _engine(CPU, force_cpu_only_input_tensors=False)
    assert not engine.on_cpu
    on_host = torch.ones(2)
    with FakeTensorMode():  # it stands for a GPU: shapes and devices without values
        columns = engine.to_device([on_host, torch.empty(2, 3, device="cuda:0")])
    assert columns[0] is on_host
    assert torch.as_tensor(columns[1]).device == CPU
