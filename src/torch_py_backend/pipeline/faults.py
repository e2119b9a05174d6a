"""The causes of exceptions: memory that ran out, or a device that is lost to this process."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

import torch

_SHORTAGE = re.compile(
    r"out of memory|\balloc_cpu\b|\bbad_alloc\b|_ALLOC(ATION)?_FAILED"
    # The first use of cuBLAS creates a handle with a workspace. If that does not fit in memory,
    # cublasCreate reports that the library is not initialized.
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create"
)


def out_of_memory(error: BaseException) -> bool:
    """Return whether device or host memory ran out.

    Many libraries say so only in the message of a RuntimeError. A message may contain text of a
    client, so no more may depend on this than the code of the client's own error.
    """
    return any(_is_shortage(link) for link in _chain(error))


def release(error: BaseException) -> None:
    """Clear the frames of an exception, which hold a batch and intermediate results of forward().

    A retry needs that memory.
    """
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    try:
        return isinstance(error, RuntimeError) and _SHORTAGE.search(str(error)) is not None
    except Exception:  # an argument whose __str__ fails
        return False


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
