"""States of sequences as columns of a batch: copied in, never sent back, taken apart on their way.

Of what a state is between two steps knows `sequences`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.gather_scatter import Batch, Owned, Value
from torch_py_backend.config.model_config import ModelConfig


class StateColumns:
    """Which columns of a batch are states; of a model without sequences, none.

    Attributes:
        inputs: the names of those that go in.
        outputs: the names of all that the model makes; states that are no outputs come last.
    """

    def __init__(self, config: ModelConfig) -> None:
        told, carried = [spec.name for spec in config.outputs], config.carried
        self.inputs = frozenset(state.input for state in config.states)
        self.outputs = (*told, *(state.output for state in carried))
        self._places = (
            range(len(told), len(self.outputs))
            if carried
            else [told.index(state.output) for state in config.states]
        )

    def owned(self, made: Sequence[Value], batch: Batch) -> Sequence[Value | Owned]:
        """What the model made; each item gets a state of its own, which outlives the batch."""
        if not self._places:
            return made
        whole: list[Value | Owned] = list(made)
        for place in self._places:
            whole[place] = gather_scatter.owned(made[place], batch.sizes)
        return whole

    def sent(self, names: Sequence[str], batch: Batch) -> Sequence[Value]:
        """The columns that requests brought."""
        if not self.inputs:
            return batch.columns
        columns = zip(names, batch.columns, strict=True)
        return [column for name, column in columns if name not in self.inputs]
