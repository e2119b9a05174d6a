"""States of sequences as columns of a batch.

`state_store` keeps the states between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.gather_scatter import Batch, ItemRows, Value
from torch_py_backend.config.model_config import ModelConfig


class StateColumns:
    """The columns of a batch that are states; none for a model without sequences.

    Attributes:
        inputs: the names of the state inputs.
        outputs: the names of all outputs; states that are not configured outputs come last.
    """

    def __init__(self, config: ModelConfig) -> None:
        names, carried = [spec.name for spec in config.outputs], config.untyped_states
        self.inputs = frozenset(state.input for state in config.states)
        self.outputs = (*names, *(state.output for state in carried))
        self._places = (
            range(len(names), len(self.outputs))
            if carried
            else [names.index(state.output) for state in config.states]
        )

    def clone_states(self, outputs: Sequence[Value], batch: Batch) -> Sequence[Value | ItemRows]:
        """Return the outputs with states split into copies for each item."""
        columns: list[Value | ItemRows] = list(outputs)
        for place in self._places:
            columns[place] = gather_scatter.clone_rows(outputs[place], batch.sizes)
        return columns

    def sent_columns(self, names: Sequence[str], batch: Batch) -> Sequence[Value]:
        """Return the columns that requests sent."""
        columns = zip(names, batch.columns, strict=True)
        return [column for name, column in columns if name not in self.inputs]
