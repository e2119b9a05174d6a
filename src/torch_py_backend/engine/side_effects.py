"""Detection of writes to a model's inputs and buffers: such a model must not be called twice with
the same items.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torch_py_backend.batching.gather_scatter import Item, Value, to_column


class SideEffects:
    """The side effects of one model's calls that were observed.

    State in attributes, files or other services is not observed.

    Attributes:
        observed: whether a call has been compared; until then the model gets copies of its inputs.
        writes_inputs: whether a call has written to its inputs.

    Args:
        owner: the module with the model's buffers; None: they are not accessible.
    """

    def __init__(self, owner: nn.Module | None) -> None:
        self._owner = owner
        self.observed = False
        self.writes_inputs = False
        self._baseline = self._state()

    def reset_baseline(self) -> None:
        """Take the present buffers as the baseline: first calls may fill tables or learn sizes."""
        self._baseline = self._state()

    def compare(self, before: Mapping[str, Value], after: Item) -> None:
        """Compare the inputs of a call with copies from before it."""
        self.observed = True
        self.writes_inputs |= any(
            not torch.equal(_bytes(value), _bytes(after[name])) for name, value in before.items()
        )

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
    # torch counts no versions of inference tensors.
    return tensor.data_ptr(), digest(tensor) if tensor.is_inference() else tensor._version  # noqa: SLF001


def digest(tensor: Tensor) -> bytes:
    """Return a hash of a tensor's values."""
    return hashlib.blake2b(_bytes(tensor.detach()).cpu().numpy().data).digest()


def copy_tensors(item: Item) -> dict[str, Value]:
    """Return copies of an item's tensors; strings are always passed as copies."""
    columns = {name: to_column(value) for name, value in item.items()}
    return {name: value.clone() for name, value in columns.items() if isinstance(value, Tensor)}


def _bytes(value: Value) -> Tensor:
    """Return a tensor's bytes, because NaN does not equal itself."""
    column = to_column(value)
    assert isinstance(column, Tensor)  # noqa: S101  from `copied`, or a buffer
    # contiguous() keeps a stride of 0 of a tensor with one value.
    return column.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
