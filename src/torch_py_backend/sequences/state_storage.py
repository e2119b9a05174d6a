"""Where the new states of sequences are stored: in rows of a pool, or as tensors of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from torch import Tensor

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.gather_scatter import Item, Part, Strings, Value
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import StateMemoryError
from torch_py_backend.sequences import row_pool
from torch_py_backend.sequences.row_pool import Form, Pool

# A correlation ID. Requests with which Triton only fills a slot have 0 or an empty string.
Id: TypeAlias = "int | str"


@dataclass(eq=False, slots=True)
class States:
    """The states of one sequence.

    Attributes:
        values: the states by the names of their inputs.
        used: the time of its last step.
        slot: the row in the pool; negative: the states are not in it.
        form: the form of the states if they could be in a pool.
        size: the bytes of the states; 0 while they are the shared initial states.
        requests_when_idle: the number of requests run when it was found idle; None: it was not.
    """

    values: Item
    used: float
    slot: int = -1
    form: Form | None = None
    size: int = 0
    requests_when_idle: int | None = None


# Counts the bytes of a sequence's new states; returns the error if they exceed the limit.
Reserve: TypeAlias = "Callable[[Id, States, int], StateMemoryError | None]"


@dataclass(eq=False, slots=True)
class NewStates:
    """Columns whose rows are the new states of several steps.

    Attributes:
        columns: one column for each state.
        form: the form of the columns; None: the rows cannot be in a pool.
        fits: whether the form is the pool's.
        holders: the sequences whose states are written to the pool.
        rows: the row of each of the holders.
    """

    columns: Sequence[Tensor]
    form: Form | None
    fits: bool
    holders: list[States] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def add(self, holder: States, row: int) -> None:
        self.holders.append(holder)
        self.rows.append(row)


class StateStorage:
    """Stores states.

    Small states of steps that ran in one batch are stored in a pool, a table. A step that ran
    alone has its own copy, which is cheaper than a row in a table.

    Attributes:
        pool: the pool, created with the first states that can be in it.

    Args:
        initial: the initial states, whose bytes are those of all steps if they are fixed.
        reserve: reserves memory for new states.
    """

    def __init__(self, config: ModelConfig, initial: Item, reserve: Reserve) -> None:
        self._inputs = [state.input for state in config.states]
        self._outputs = [state.output for state in config.states]
        self._batched = config.max_batch_size > 0
        self._reserve = reserve
        types = [state.dtype for state in config.states]
        self._has_strings = any(dtype is not None and dtype.torch is None for dtype in types)
        fixed = all(
            state.dtype is not None and state.dtype.torch and -1 not in state.dims
            for state in config.states
        )
        self._fixed_size = sum(map(_size, initial.values())) if fixed else None
        self.pool: Pool | None = None

    def store(
        self,
        name: Id,
        states: States,
        outcome: Mapping[str, Value | Part],
        batches: dict[int, NewStates],
    ) -> StateMemoryError | None:
        """Store the new states of one step; return the error if that is refused.

        Args:
            name: the correlation ID of the sequence.
            states: its states.
            outcome: the step's outcome.
            batches: the columns of all steps by their id(); the caller writes them to the pool.
        """
        batch, form, row = None, None, 0
        first = outcome[self._outputs[0]]
        if isinstance(first, tuple):
            column, row = first
            batch = batches.get(id(column))
            if batch is None:
                batch = batches[id(column)] = self._new_states(outcome)
            if batch.fits and states.slot >= 0:
                batch.add(states, row)
                return None
            form = batch.form
        values = [gather_scatter.part_value(outcome[output]) for output in self._outputs]
        if self._has_strings:
            values = [_encode_strings(value) for value in values]
        size = sum(map(_size, values)) if self._fixed_size is None else self._fixed_size
        error = self._reserve(name, states, size)
        if error is not None:
            return error
        if states.slot >= 0 and self.pool is not None:
            self.pool.remove(states)
        # States that grow would leave the pool in each step.
        keeps_form = self._fixed_size is not None or states.form == form
        if batch is not None and form is not None and keeps_form:
            if self.pool is None:
                self.pool = Pool(self._inputs, batch.columns)
            if self.pool.form == form:
                self.pool.add(states)
                batch.add(states, row)
                return None
        states.form = form
        states.values = {
            state: gather_scatter.clone(value) if isinstance(outcome[output], tuple) else value
            for state, output, value in zip(self._inputs, self._outputs, values, strict=True)
        }
        return None

    def _new_states(self, outcome: Mapping[str, Value | Part]) -> NewStates:
        """Return the columns that an outcome's states are rows of."""
        values = [outcome[output] for output in self._outputs]
        columns = [value[0] if isinstance(value, tuple) else value for value in values]
        tensors = [column for column in columns if isinstance(column, Tensor)]
        if self._fixed_size is not None and self.pool is not None:
            # All states have the pool's form.
            return NewStates(tensors, self.pool.form, fits=True)
        small = (
            self._batched
            and len(tensors) == len(columns)
            and all(
                column.nbytes <= gather_scatter.SMALL_ROW_BYTES * column.shape[0]
                for column in tensors
            )
        )
        form = row_pool.form(tensors) if small else None
        return NewStates(tensors, form, fits=self.pool is not None and self.pool.form == form)


def _encode_strings(value: Value) -> Value:
    """Encode strings as in requests; return numbers unchanged."""
    if isinstance(value, Tensor):
        return value
    strings: Strings = np.empty(value.shape, dtype=np.object_)
    strings.ravel()[:] = [
        text if isinstance(text, bytes) else text.encode() for text in value.reshape(-1).tolist()
    ]
    return strings


def _size(value: Value) -> int:
    """Return the bytes of a state."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(len, value.reshape(-1).tolist()))
