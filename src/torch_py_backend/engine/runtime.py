"""The runtime of a model: device, threads, inference mode, PyTorch's global switches."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.config.options import Options
from torch_py_backend.config.threads import Threads
from torch_py_backend.errors import PlatformError, summarize
from torch_py_backend.values import Value

Guard: TypeAlias = "Callable[[], AbstractContextManager[object]]"


@dataclass(frozen=True, slots=True)
class Runtime:
    """The device of one instance's model and the context of its calls.

    Attributes:
        device: the device of the inputs.
        guard: the context of each call; thread-local.
        clean: called after each execution; None: the config does not enable that.
        host_inputs: whether Triton copies all inputs to host memory.
    """

    device: torch.device
    guard: Guard
    clean: Callable[[], None] | None
    host_inputs: bool = True

    @property
    def on_cpu(self) -> bool:
        """Whether the instance and all inputs are on the CPU; the model itself may use a GPU."""
        return self.host_inputs and self.device.type == "cpu"

    def to_device(self, columns: Sequence[Value]) -> Sequence[Value]:
        """Copy tensors to this instance's device where they are elsewhere."""
        if self.on_cpu:
            return columns
        # A copy to the host is read without synchronization, so it must not be asynchronous.
        asynchronous = self.device.type != "cpu"
        return [
            column.to(self.device, non_blocking=asynchronous)
            if isinstance(column, Tensor)
            else column
            for column in columns
        ]


def thread_state(device: torch.device) -> tuple[object, ...]:
    """Return thread state that a model may leave changed, such as the stack of torch.device."""
    return (
        torch.is_autocast_enabled(device.type),
        torch._C._len_torch_function_stack(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )


def make_current(device: torch.device) -> None:
    """Make a GPU the current device of this thread; by default that is the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def memory() -> list[tuple[int, int]]:
    """Return the index and the allocated bytes of each GPU that this process uses."""
    if not torch.cuda.is_initialized():
        return []
    return [
        (index, torch.cuda.memory_allocated(index))
        for index in range(torch.cuda.device_count())
        if torch.cuda.memory_reserved(index)
    ]


def placement(config: ModelConfig) -> torch.device | None:
    """Return the device of this instance and make it current; None for KIND_MODEL.

    Raises:
        PlatformError: the config's GPU is not visible to this process, or torch cannot use it.
    """
    if config.kind == "MODEL":
        return None
    if config.kind != "GPU":
        return torch.device("cpu")
    device = torch.device("cuda", config.device_id)
    try:
        torch.cuda.init()
        torch.cuda.set_device(device)
        run_kernel(device)
    except Exception as error:  # RuntimeError, AssertionError or torch's own classes
        raise PlatformError(
            f"instance_group asks for GPU {device.index}, on which torch {torch.__version__} cannot"
            f" run a kernel ({summarize(error)})",
            cure="Use KIND_CPU, update the driver, or install a torch built for this GPU and at"
            " most the CUDA version that nvidia-smi prints.",
        ) from error
    fraction = config.options.cuda_memory_fraction
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, device)
    return device


def run_kernel(device: torch.device) -> None:
    """Run a kernel on a GPU.

    Raises:
        RuntimeError: torch has none for it.
    """
    torch.ones(1, device=device).neg().item()


def set_switches(options: Options, threads: Threads) -> None:
    """Set PyTorch's process-wide switches: a process serves one instance of one model.

    Call it once, in the thread that runs the model, before the model is loaded.
    """
    torch.set_num_threads(threads.intra_op)
    # torch allows this once per process, before any parallel work.
    if torch.get_num_interop_threads() != threads.inter_op:
        torch.set_num_interop_threads(threads.inter_op)
    torch.backends.cudnn.enabled = not options.disable_cudnn
    if options.float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(options.float32_matmul_precision)
    switches: tuple[tuple[bool | None, Callable[[bool], object]], ...] = (
        (options.enable_jit_executor, torch._C._jit_set_profiling_executor),
        (options.enable_jit_profiling, torch._C._jit_set_profiling_mode),
        (options.enable_tensor_fuser, torch._C._jit_set_texpr_fuser_enabled),
        (
            False if options.disable_optimized_execution else None,
            torch._C._set_graph_executor_optimize,
        ),
    )
    for enabled, switch in switches:
        if enabled is not None:
            switch(enabled)


# Parameters of glibc's mallopt(3), and their values in bytes. 32 MiB is the most for the second.
_MALLOPT = {-1: 512 << 20, -3: 32 << 20}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD


def keep_freed_memory() -> None:
    """Let malloc keep the memory that a batch has freed, for the next one.

    By default it returns most of it to the kernel, and each batch pays for page faults. To be
    called when the model is loaded: what the load has freed is returned.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return  # the user has set it
    with contextlib.suppress(AttributeError):  # musl has no mallopt
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        for parameter, size in _MALLOPT.items():
            libc.mallopt(parameter, size)


def create(options: Options, device: torch.device | None, weights: Iterable[Tensor]) -> Runtime:
    """Return the runtime for a loaded model.

    Without a device, it is that of the first of `weights`, the model's parameters and buffers.
    """
    if device is None:
        first = next(iter(weights), None)
        device = torch.device("cpu") if first is None else first.device
    guard: Guard = _inference_mode if options.inference_mode else torch.no_grad
    on_gpu = device.type == "cuda"
    return Runtime(
        device=device,
        guard=guard,
        clean=torch.cuda.empty_cache if options.enable_cache_cleaning and on_gpu else None,
        host_inputs=options.force_cpu_only_input_tensors,
    )


def mode(options: Options) -> AbstractContextManager[object]:
    """Return the context of a thread that calls the model, warm-up included.

    Tensors made in inference mode have other dispatch keys, for which torch.compile recompiles.
    """
    return torch.inference_mode() if options.inference_mode else contextlib.nullcontext()


_ENTERED = contextlib.nullcontext()


def _inference_mode() -> AbstractContextManager[object]:
    """Enter inference mode unless the thread is in it: entering costs as much as a small model."""
    return _ENTERED if torch.is_inference_mode_enabled() else torch.inference_mode()
