"""What an exception tells of the process that it was raised in: out of memory, or beyond help.

Told from the classes that torch raises, and from the beginning of its own messages: what a model
puts into an exception may come from a client, who must not be able to talk a server down.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

import torch

# CUDA's documentation on each: "leaves the process in an inconsistent state and any further CUDA
# work will return the same error. To continue using CUDA, the process must be terminated".
_STICKY = {
    700: "illegal address",
    702: "launch timeout",
    710: "device-side assert",
    714: "hardware stack error",
    715: "illegal instruction",
    716: "misaligned address",
    717: "invalid address space",
    718: "invalid program counter",
    719: "launch failure",
}
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_MEMORY = re.compile(
    r"(\[enforce fail at alloc_cpu|CUDA out of memory\.|std::bad_alloc$"
    # A handle of cuBLAS is made at its first use, and has a workspace of its own: where that does
    # not fit, cublasCreate tells of a library that is not initialized.
    r"|CUDA error: (out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create)"
    r"|Triton Error \[CUDA\]: out of memory"
    r"|cuDNN error: CUDNN_STATUS_ALLOC_FAILED)"
)
_TORCHSCRIPT = "The following operation failed in the TorchScript interpreter."


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the device or on the host."""
    return any(_is_shortage(one) for one in _chain(error))


def is_sticky(error: BaseException) -> bool:
    """Whether it is a CUDA error after which this process cannot use the device any more."""
    return any(_code(one) in _STICKY for one in _chain(error))


def release(error: BaseException) -> None:
    """Let go of what the frames of an exception hold: a batch, and all that forward() made of it.

    Before a second try: it needs the memory.
    """
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _code(error) == _OUT_OF_MEMORY:
        return True
    if type(error) is not RuntimeError:
        return False
    said = _text(error)
    if said.startswith(_TORCHSCRIPT):  # what was raised stands in its last line
        said = said.rstrip().rpartition("\n")[2].removeprefix("RuntimeError: ")
    return _MEMORY.match(said) is not None


def _code(error: BaseException) -> int | None:
    """CUDA's number for an error, where torch (2.8 and newer) tells it."""
    kind = getattr(torch, "AcceleratorError", None)
    return getattr(error, "error_code", None) if kind and isinstance(error, kind) else None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a class of the model's own
        return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that it was raised from or during."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            pending += [one.__cause__, one.__context__]
