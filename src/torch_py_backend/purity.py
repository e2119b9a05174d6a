"""Whether a model leaves its own buffers, and its inputs, as they are: only then may it be called
again with what it has seen.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torch_py_backend.batching import Item, Value, to_column


class Purity:
    """What was seen of one model.

    What it keeps elsewhere (attributes, files, other services) is not seen.

    Args:
        owner: what holds the model's buffers; None: they are not at hand.
    """

    def __init__(self, owner: nn.Module | None) -> None:
        self._owner = owner
        self._writes_inputs = False
        self._settled = self._state()

    def settle(self) -> None:
        """What the first calls have changed is no state: tables are made, sizes are learnt."""
        self._settled = self._state()

    def compare(self, before: Mapping[str, Value], after: Item) -> None:
        """Look whether a call has written into its inputs."""
        self._writes_inputs |= any(
            not torch.equal(_bytes(value), _bytes(after[name])) for name, value in before.items()
        )

    def broken(self) -> bool:
        """Whether the model has changed a buffer since it settled, or ever an input."""
        return self._writes_inputs or self.writes_buffers()

    def writes_buffers(self) -> bool:
        """Whether the model has changed a buffer since it settled."""
        return self._state() != self._settled

    def _state(self) -> list[tuple[int, int]]:
        """Each buffer's place and how often it was written."""
        return [
            (buffer.data_ptr(), 0 if buffer.is_inference() else buffer._version)  # noqa: SLF001
            for buffer in (self._owner.buffers() if self._owner is not None else ())
        ]


def copied(item: Item) -> dict[str, Value]:
    """The item's numbers as they are now; strings are handed over as copies anyway."""
    columns = {name: to_column(value) for name, value in item.items()}
    return {name: one.clone() for name, one in columns.items() if isinstance(one, Tensor)}


def _bytes(value: Value) -> Tensor:
    """A tensor's memory: NaN is not equal to itself."""
    column = to_column(value)
    assert isinstance(column, Tensor)  # noqa: S101  of `copied`
    # A tensor of one value may have a stride of 0, which contiguous() leaves.
    return column.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
