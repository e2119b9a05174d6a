"""Classification of exceptions: out of memory, or a CUDA error that makes the process unusable.

Only the classes that torch raises and the beginnings of its messages count. The rest of a message
may come from a client, and a client must not be able to stop the server.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

import torch

# Illegal address, launch timeout, assert, and the like. CUDA's documentation on each: "leaves the
# process in an inconsistent state and any further CUDA work will return the same error. To continue
# using CUDA, the process must be terminated".
_STICKY = frozenset({700, 702, 710, *range(714, 720)})
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_MEMORY = re.compile(
    r"(\[enforce fail at alloc_cpu|CUDA out of memory\.|std::bad_alloc$"
    # The first use of cuBLAS creates a handle with a workspace. If that does not fit in memory,
    # cublasCreate reports that the library is not initialized.
    r"|CUDA error: (out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create)"
    r"|(Triton Error \[CUDA\]|CUDA driver error): out of memory"
    r"|cuFFT error: CUFFT_ALLOC_FAILED|cusolver error: CUSOLVER_STATUS_ALLOC_FAILED"
    r"|cuDNN error: CUDNN_STATUS_(ALLOC_FAILED"  # up to cuDNN 8
    r"|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED))"
)
_TORCHSCRIPT = "The following operation failed in the TorchScript interpreter."


def out_of_memory(error: BaseException) -> bool:
    """Return whether device or host memory ran out."""
    return any(_is_shortage(link) for link in _chain(error))


def is_sticky(error: BaseException) -> bool:
    """Return whether this is a CUDA error after which the process cannot use the device."""
    return any(_code(link) in _STICKY for link in _chain(error))


def release(error: BaseException) -> None:
    """Clear the frames of an exception, which hold a batch and intermediate results of forward().

    A retry needs that memory.
    """
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _code(error) == _OUT_OF_MEMORY:
        return True
    if type(error) is not RuntimeError:
        return False
    try:
        message = str(error)
    except Exception:  # an argument whose __str__ fails
        return False
    if message.startswith(_TORCHSCRIPT):  # the original error is in the last line
        message = message.rstrip().rpartition("\n")[2].removeprefix("RuntimeError: ")
    return _MEMORY.match(message) is not None


def _code(error: BaseException) -> int | None:
    """Return CUDA's error number where torch (2.8 and newer) provides it."""
    kind = getattr(torch, "AcceleratorError", None)
    return getattr(error, "error_code", None) if kind and isinstance(error, kind) else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, its causes and its contexts."""
    visited: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in visited:
            visited.add(id(link))
            yield link
            pending += [link.__cause__, link.__context__]


# --- GPUs ------------------------------------------------------------------------------------


def free() -> None:
    """Return torch's cached GPU memory to the device."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def probe(device: torch.device) -> None:
    """Synchronize with the GPUs that this process uses.

    Raises:
        RuntimeError: a GPU is unusable: after a sticky CUDA error every later call reports it.
    """
    if not torch.cuda.is_initialized():
        return
    for index in range(torch.cuda.device_count()):
        # Synchronizing with an unused device, even the current one, would allocate memory on it.
        if torch.device("cuda", index) == device or torch.cuda.memory_reserved(index):
            torch.cuda.synchronize(index)
