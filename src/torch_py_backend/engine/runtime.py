"""The runtime of a model: device, threads, inference mode, PyTorch's global switches."""

from __future__ import annotations

import contextlib
import ctypes
import os
from contextlib import AbstractContextManager

import torch

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.config.options import Options
from torch_py_backend.config.threads import Threads
from torch_py_backend.errors import PlatformError, summarize


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
        torch.ones(1, device=device).neg().item()  # torch may have no kernels for it
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


def set_switches(options: Options, threads: Threads) -> None:
    """Set PyTorch's process-wide switches, once, before the model is loaded, and in its thread."""
    torch.set_num_threads(threads.intra_op)
    # torch allows this once per process, before any parallel work.
    if torch.get_num_interop_threads() != threads.inter_op:
        torch.set_num_interop_threads(threads.inter_op)
    torch.backends.cudnn.enabled = not options.disable_cudnn
    if options.float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(options.float32_matmul_precision)
    if options.enable_jit_executor is not None:
        torch._C._jit_set_profiling_executor(options.enable_jit_executor)
    if options.enable_jit_profiling is not None:
        torch._C._jit_set_profiling_mode(options.enable_jit_profiling)
    if options.enable_tensor_fuser is not None:
        torch._C._jit_set_texpr_fuser_enabled(options.enable_tensor_fuser)
    if options.disable_optimized_execution:
        torch._C._set_graph_executor_optimize(False)  # noqa: FBT003


def keep_freed_memory() -> None:
    """Let malloc keep the memory that a batch has freed: page faults of the next one take time.

    To be called when the model is loaded: what the load has freed is returned to the kernel.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return  # the user has set it
    with contextlib.suppress(AttributeError):  # musl has no mallopt
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallopt(-1, 512 << 20)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its maximum


def mode(options: Options) -> AbstractContextManager[object]:
    """Return the context of a thread that calls the model, warm-up included.

    Tensors made in inference mode have other dispatch keys, for which torch.compile recompiles.
    """
    return torch.inference_mode() if options.inference_mode else torch.no_grad()
