"""Whether a model leaves its own buffers, and its inputs, as they are: only then may it be called
again with what it has seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torch_py_backend.batching.gather_scatter import Item, Value, to_column


class Purity:
    """What was seen of one model.

    What it keeps elsewhere (attributes, files, other services) is not seen.

    Attributes:
        known: whether a call was looked at: until then the model is given copies.

    Args:
        owner: what holds the model's buffers; None: they are not at hand.
        captured: calls are replayed from CUDA graphs, whose writes torch does not count.
    """

    def __init__(self, owner: nn.Module | None, *, captured: bool = False) -> None:
        self._owner = owner
        self._captured = captured
        self.known = False
        self._writes_inputs = False
        self._settled = self._state()

    def settle(self) -> None:
        """What the first calls have changed is no state: tables are made, sizes are learnt."""
        self._settled = self._state()

    def compare(self, before: Mapping[str, Value], after: Item) -> None:
        """Look whether a call has written into its inputs."""
        self.known = True
        self._writes_inputs = self._writes_inputs or any(
            not torch.equal(_bytes(value), _bytes(after[name])) for name, value in before.items()
        )

    def writes_inputs(self) -> bool:
        """Whether the model was seen to write into its inputs."""
        return self._writes_inputs

    def writes_buffers(self) -> bool:
        """Whether the model has changed a buffer since it settled."""
        return self._state() != self._settled

    def _state(self) -> list[tuple[int, int | bytes]]:
        """Each buffer's place, and how often it was written or, where torch does not count, a hash.

        Inference tensors have no version: a buffer that `forward()` makes in inference mode.
        """
        return [
            (
                buffer.data_ptr(),
                _digest(buffer) if self._captured or buffer.is_inference() else buffer._version,  # noqa: SLF001
            )
            for buffer in (self._owner.buffers() if self._owner is not None else ())
        ]


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(_bytes(tensor.detach()).cpu().numpy().data).digest()


def copied(item: Item) -> dict[str, Value]:
    """The item's numbers as they are now; strings are handed over as copies anyway."""
    columns = {name: to_column(value) for name, value in item.items()}
    return {name: one.clone() for name, one in columns.items() if isinstance(one, Tensor)}


def _bytes(value: Value) -> Tensor:
    """A tensor's memory: NaN is not equal to itself."""
    column = to_column(value)
    assert isinstance(column, Tensor)  # noqa: S101  of `copied`, or a buffer
    # A tensor of one value may have a stride of 0, which contiguous() leaves.
    return column.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
