"""Detection of writes to a model's buffers: such a model must not be called twice for a request."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


class SideEffects:
    """The writes of one model's calls to its buffers.

    State in attributes, files or other services is not observed.

    Args:
        owner: the module with the model's buffers; None: they are not accessible.
    """

    def __init__(self, owner: nn.Module | None) -> None:
        self._owner = owner
        self._baseline = self._state()

    def reset_baseline(self) -> None:
        """Take the present buffers as the baseline: first calls may fill tables or learn sizes."""
        self._baseline = self._state()

    def writes_buffers(self) -> bool:
        """Return whether a buffer has changed since `reset_baseline`."""
        return self._state() != self._baseline

    def _state(self) -> list[tuple[int, int | bytes]]:
        buffers = self._owner.buffers() if self._owner is not None else ()
        return [version(buffer) for buffer in buffers]


def version(tensor: Tensor) -> tuple[int, int | bytes]:
    """Return a tensor's address and version; a hash where torch counts no versions.

    Inference tensors (buffers that `forward()` creates in inference mode) have no version.
    """
    counted = digest(tensor) if tensor.is_inference() else tensor._version  # noqa: SLF001  has no public name
    return tensor.data_ptr(), counted


def digest(tensor: Tensor) -> bytes:
    """Return a hash of a tensor's values."""
    # contiguous() keeps a stride of 0 of a tensor with one value.
    values = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return hashlib.blake2b(values.view(torch.uint8).cpu().numpy().data).digest()
