import json
import subprocess
import sys
from typing import Any

import build
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_py_backend.batching import runtime
from torch_py_backend.config.options import Options
from torch_py_backend.config.threads import Threads
from torch_py_backend.errors import LoadError, PlatformError

CPU = torch.device("cpu")


def settle(**options: Any) -> None:
    runtime.set_switches(Options(**options), Threads(1, torch.get_num_interop_threads()))


def state() -> dict[str, bool]:
    """Return the values of the switches; switches without a getter are set, read and restored."""
    executor = torch._C._jit_set_profiling_executor(True)
    torch._C._jit_set_profiling_executor(executor)
    profiling = torch._C._jit_set_profiling_mode(True)
    torch._C._jit_set_profiling_mode(profiling)
    return {
        "executor": executor,
        "profiling": profiling,
        "fuser": torch._C._jit_texpr_fuser_enabled(),
        "optimize": torch._C._get_graph_executor_optimize(),
        "cudnn": torch.backends.cudnn.enabled,
    }


# --- the whole process -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
    ("option", "switch"),
    [
        ("enable_jit_executor", "executor"),
        ("enable_jit_profiling", "profiling"),
        ("enable_tensor_fuser", "fuser"),
    ],
)
@pytest.mark.usefixtures("process")
def test_jit_switch_is_set_when_its_key_is_present(option: str, switch: str, value: bool) -> None:
    """A TorchScript switch gets the config's value, and others do not change."""
    before = state()

    settle(**{option: value})

    assert state() == before | {switch: value}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.usefixtures("process")
def test_jit_switches_stay_without_keys(enabled: bool) -> None:
    """Without keys PyTorch's own settings stay."""
    torch._C._jit_set_profiling_executor(enabled)
    torch._C._jit_set_profiling_mode(enabled)
    torch._C._jit_set_texpr_fuser_enabled(enabled)
    torch._C._set_graph_executor_optimize(enabled)
    before = state()

    settle()

    assert state() == before


@pytest.mark.usefixtures("process")
def test_optimisation_is_switched_off_on_demand() -> None:
    """DISABLE_OPTIMIZED_EXECUTION sets TorchScript's graph executor."""
    torch._C._set_graph_executor_optimize(True)

    settle(disable_optimized_execution=True)

    assert not state()["optimize"]


@pytest.mark.parametrize("disable", [True, False])
@pytest.mark.usefixtures("process")
def test_cudnn_is_switched_off_on_demand(disable: bool) -> None:
    """DISABLE_CUDNN sets torch.backends.cudnn.enabled."""
    settle(disable_cudnn=disable)

    assert torch.backends.cudnn.enabled is not disable


def test_threads_of_a_fresh_process_are_the_budget() -> None:
    """In a fresh process both thread counts become the budget's, also when set twice."""
    program = """
import json, torch
from torch_py_backend.batching import runtime
from torch_py_backend.config.options import Options
from torch_py_backend.config.threads import Threads
for _ in range(2):
    runtime.set_switches(Options(), Threads(intra_op=3, inter_op=5))
print(json.dumps([torch.get_num_threads(), torch.get_num_interop_threads()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )

    assert json.loads(done.stdout) == [3, 5]


# --- the device ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        pytest.param("CPU", CPU, id="CPU"),
        pytest.param("AUTO", CPU, id="AUTO"),
        pytest.param("MODEL", None, id="MODEL places itself"),
    ],
)
def test_device_is_the_instance_groups(kind: str, device: torch.device | None) -> None:
    """The instance's kind determines the device of its model."""
    assert runtime.placement(build.config(kind=kind)) == device


def test_device_is_the_instances_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance on a GPU gets that GPU as its current device."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)

    device = runtime.placement(build.config(kind="GPU", device_id=1))

    assert device == torch.device("cuda", 1)
    assert current == [device]


@pytest.mark.parametrize(
    ("visible", "wished"), [(0, 0), (1, 1), (2, 7)], ids=["no GPU", "one", "two"]
)
def test_missing_gpu(visible: int, wished: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that torch does not see fails the load with what it sees and what to do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)

    with pytest.raises(PlatformError) as raised:
        runtime.placement(build.config(kind="GPU", device_id=wished))

    text = str(raised.value)
    assert isinstance(raised.value, LoadError)
    assert f"'digits': instance_group asks for GPU {wished}" in text
    assert f"torch {torch.__version__} sees {visible} GPUs" in text
    assert "Use KIND_CPU" in text


@pytest.mark.parametrize(
    ("device", "weights", "expected"),
    [
        pytest.param(CPU, [], CPU, id="given"),
        pytest.param(CPU, [torch.ones(1, device="meta")], CPU, id="given, not the weights'"),
        pytest.param(
            None, [torch.ones(1, device="meta"), torch.ones(1)], torch.device("meta"), id="weights'"
        ),
        pytest.param(None, [], CPU, id="no weights"),
    ],
)
def test_inputs_go_to_the_model(
    device: torch.device | None, weights: list[torch.Tensor], expected: torch.device
) -> None:
    """A model that places itself gets its inputs on the device of its first weight."""
    surroundings = runtime.create(Options(), device, iter(weights))

    assert surroundings.device == expected


def test_cpu_tensors_are_not_touched() -> None:
    """On the CPU nothing is copied on the way in or out."""
    surroundings = runtime.create(Options(), CPU, [])
    columns = [torch.ones(2)]

    assert surroundings.to_device(columns) is columns
    assert surroundings.to_host(columns, columns) is columns


def test_inputs_that_triton_leaves_on_the_gpu_come_to_a_model_on_the_cpu() -> None:
    """Triton uses the parameter and not the instance's kind."""
    surroundings = runtime.create(Options(force_cpu_only_input_tensors=False), CPU, [])
    on_host = torch.ones(2)

    with FakeTensorMode():  # it stands for a GPU: shapes and devices without values
        columns = surroundings.to_device([on_host, torch.empty(2, 3, device="cuda:0")])

    assert columns[0] is on_host
    assert [column.device for column in columns if isinstance(column, Tensor)] == [CPU, CPU]


@pytest.mark.parametrize("kind", ["CPU", "MODEL"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU on this machine")
def test_inputs_on_a_gpu_that_torch_does_not_see(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning at load says that requests with tensors on a GPU are refused."""
    runtime.placement(build.config(kind=kind, force_cpu_only_input_tensors=False))

    (record,) = caplog.records
    assert record.getMessage() == (
        f"model 'digits': FORCE_CPU_ONLY_INPUT_TENSORS is 'no', and torch {torch.__version__} sees"
        " no GPU: a request whose tensors are on one is refused. Remove the parameter."
    )


def test_tensors_are_moved_to_another_device() -> None:
    """Columns are moved to the model's device."""
    surroundings = runtime.create(Options(), None, [torch.ones(1, device="meta")])

    (column,) = surroundings.to_device([torch.ones(2, 3)])

    assert isinstance(column, Tensor)
    assert column.device.type == "meta"
    assert column.shape == (2, 3)


@pytest.mark.parametrize("clean", [True, False])
def test_there_is_no_cuda_cache_to_clean_on_the_cpu(clean: bool) -> None:
    """ENABLE_CACHE_CLEANING has no effect without a GPU."""
    surroundings = runtime.create(Options(enable_cache_cleaning=clean), CPU, [])

    assert surroundings.clean is None


# --- the context of a call -------------------------------------------------------------------


@pytest.mark.parametrize("inference_mode", [True, False])
def test_no_gradients_are_recorded(inference_mode: bool) -> None:
    """Every call runs without autograd: in inference mode, or under no_grad if that is disabled."""
    surroundings = runtime.create(Options(inference_mode=inference_mode), CPU, [])
    weight = torch.ones(2, requires_grad=True)

    for _ in range(2):
        with surroundings.guard():
            assert torch.is_inference_mode_enabled() is inference_mode
            assert not (weight * 2).requires_grad
        assert (weight * 2).requires_grad
        assert not torch.is_inference_mode_enabled()


# --- broken and full devices -----------------------------------------------------------------


def _gpus(monkeypatch: pytest.MonkeyPatch, reserved: dict[int, int], current: int) -> list[Any]:
    """A process that sees the listed GPUs; records what is done to them."""
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(reserved))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: reserved[index])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(("set", device)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: done.append(("probe", index)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("free"))
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, device: done.append((share, device)),
    )
    return done


def test_probe_uses_only_devices_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Using another GPU, even the current one, would allocate memory there."""
    done = _gpus(monkeypatch, {0: 0, 1: 0, 2: 5}, current=0)
    runtime.probe(torch.device("cuda", 1))

    assert done == [("probe", 1), ("probe", 2)]


def test_probe_raises_the_devices_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost device raises at every call."""
    _gpus(monkeypatch, {0: 0}, current=0)

    def gone(index: int) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    with pytest.raises(RuntimeError, match="device-side assert"):
        runtime.probe(torch.device("cuda", 0))


def test_processes_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA was never used, it is not used for probes either."""
    done = _gpus(monkeypatch, {0: 0}, current=0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    runtime.probe(torch.device("cuda", 0))
    runtime.free()

    assert done == []


@pytest.mark.parametrize(("optimize", "cached"), [((), True), (("cuda_graphs",), False)])
def test_autocast_caches_no_weights_that_graphs_read(
    optimize: tuple[str, ...], cached: bool
) -> None:
    """A captured graph would read casts that are freed when autocast ends."""
    options = Options(optimize=("bf16", *optimize))
    with runtime.create(options, torch.device("cpu"), ()).guard():
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled() == cached


def test_memory_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_MEMORY_FRACTION applies to the instance's own GPU."""
    done = _gpus(monkeypatch, {0: 0, 1: 0}, current=0)
    device = runtime.placement(build.config(kind="GPU", device_id=1, cuda_memory_fraction=0.25))

    assert done == [("set", device), (0.25, device)]


@pytest.mark.parametrize("kind", ["CPU", "MODEL"])
def test_memory_fraction_without_a_gpu(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without a GPU a warning says that the parameter has no effect."""
    runtime.placement(build.config(kind=kind, cuda_memory_fraction=0.25))

    assert f"CUDA_MEMORY_FRACTION has no effect on KIND_{kind}" in caplog.text
