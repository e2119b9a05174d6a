"""State per correlation ID: initialized, passed to each step, replaced by its result, freed.

A state is an additional input and output of an item. Steps of different sequences share batches as
other items do. A failed step replaces no state, so it may be retried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torch_py_backend.batching import gather_scatter, runtime
from torch_py_backend.batching.gather_scatter import Item, Outcome, Part, Value
from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.errors import BackendError, InputError, StateMemoryError
from torch_py_backend.sequences import initial_states
from torch_py_backend.sequences.state_storage import Id, NewStates, States, StateStorage
from torch_py_backend.signature import binding
from torch_py_backend.signature.arguments import Signature

log = logging.getLogger(__name__)

# Columns on a GPU and their copies on the host, by the id() of the column.
_Fetched: TypeAlias = "dict[int, tuple[Tensor, Tensor]]"

# After this many seconds without a run, the instance's queue in Triton is empty.
_QUIET_S = 1.0
# A model that is short of memory may refuse many steps per second.
_BETWEEN_WARNINGS_S = 60.0
_MEGABYTE = 1 << 20


class Step(NamedTuple):
    """One request of a sequence.

    Attributes:
        id: the correlation ID.
        starts: whether it is the first step.
        ends: whether it is the last step.
        item: the request's item.
    """

    id: Id
    starts: bool
    ends: bool
    item: Item


# --- at load -----------------------------------------------------------------------------------


def with_controls(config: ModelConfig, signature: Signature) -> ModelConfig:
    """Return the config with the controls added to its inputs that forward() takes."""
    if config.sequencing is None or not config.sequencing.controls:
        return config
    names = [spec.name for spec in config.inputs]
    controls = {control.name: control for control in config.sequencing.controls}
    accepted = binding.accepted_names(names, list(controls), signature)
    specs = (
        TensorSpec(name, controls[name].dtype, (1,), origin=Origin.CONTROL) for name in accepted
    )
    return dataclasses.replace(config, inputs=(*config.inputs, *specs))


def next_item(config: ModelConfig, item: Item, outcome: dict[str, Value]) -> Item:
    """Return the item of the next step: the same with the states that this step returned."""
    return item | {
        state.input: gather_scatter.part_value(outcome[state.output]) for state in config.states
    }


# --- while it serves ---------------------------------------------------------------------------


class Sequences:
    """The states of all sequences of one instance.

    Attributes:
        size: the bytes of all states.

    Args:
        run: runs items, returns their outcomes in order.
        device: the device of the states.
        clock: returns seconds.
        guard: the context for work on the device's tensors.
    """

    def __init__(
        self,
        config: ModelConfig,
        run: Callable[[Sequence[Item]], Sequence[Outcome]],
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        guard: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        sequencing = config.sequencing
        assert sequencing is not None  # noqa: S101  only sequences have states
        self.size = 0
        self._model = config.name
        self._run_items = run
        self._clock = clock
        self._guard = guard
        outputs = [state.output for state in config.states]
        public = {spec.name for spec in config.outputs if spec.origin is Origin.CLIENT}
        self._hidden = [name for name in outputs if name not in public]
        self._public = [name for name in outputs if name in public]
        rows = 1 if config.max_batch_size > 0 else None
        self._initial = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in initial_states.find(config, rows).items()
        }
        self._storage = StateStorage(config, self._initial, self._reserve_memory)
        self._store = self._storage.store
        limit = config.options.sequence_memory_mb
        self._limit_mb = limit or 0
        self._limit = math.inf if limit is None else limit * _MEGABYTE
        self._refused = 0
        self._next_warning = -math.inf
        self._quiet = _QUIET_S + sequencing.delay_s
        self._idle = sequencing.idle_s + self._quiet
        # The most requests that may be queued for an instance or running in it.
        self._backlog = sequencing.slots + max(1, config.max_batch_size)
        self._sequences: dict[Id, States] = {}
        self._requests = 0
        self._last_run = clock()
        # Held while a batch runs: another thread calls `sweep`.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of live sequences."""
        return len(self._sequences)

    def run(self, steps: Sequence[Step]) -> list[Outcome]:
        """Return one outcome for each step, in order, without states that are not outputs.

        Requests that only fill a slot are not run; their outcomes are empty.
        """
        outcomes: list[Outcome] = [{} for _ in steps]
        with self._lock:
            rounds = _rounds(steps)
            for number, places in enumerate(rounds, 1):
                results = self._run_round([steps[place] for place in places])
                if number < len(rounds):  # the next round may overwrite the model's outputs
                    with self._guard():
                        results = [_copy(outcome) for outcome in results]
                for place, outcome in zip(places, results, strict=True):
                    outcomes[place] = outcome
            self._requests += len(steps)
            self._last_run = self._clock()
        return outcomes

    def skip(self, name: Id, *, starts: bool, ends: bool) -> None:
        """Begin and end the sequence of a step that cannot be run."""
        with self._lock:
            if starts:
                self._begin(name)
            if ends:
                self._drop(name)

    def sweep(self) -> None:
        """Free the states of sequences that Triton has forgotten."""
        if not self._lock.acquire(blocking=False):  # a batch is running; the next sweep will do
            return
        try:
            self._free()
            if self._storage.pool is not None:
                # A smaller table needs memory while the old one is still there.
                with self._guard(), contextlib.suppress(torch.OutOfMemoryError):
                    self._storage.pool.trim()
        finally:
            self._lock.release()

    def _run_round(self, steps: Sequence[Step]) -> list[Outcome]:
        """Run steps of different sequences."""
        sequences = [
            self._begin(step.id) if step.starts else self._sequences.get(step.id) for step in steps
        ]
        now = self._clock()
        run, items = [], []
        for step, sequence in zip(steps, sequences, strict=True):
            if sequence is not None:
                sequence.used, sequence.requests_when_idle = now, None
                run.append((step, sequence))
                items.append(step.item | sequence.values)
        try:
            outcomes = self._run_items(items) if items else ()
            with self._guard():
                updated = iter(self._update(run, outcomes))
            return [
                InputError(
                    self._model,
                    f"sequence {step.id} has no state here: it was not begun, or it idled too"
                    " long, or the model was reloaded",
                    expected="the START flag in the first request of a sequence",
                )
                if sequence is None
                else next(updated)
                for step, sequence in zip(steps, sequences, strict=True)
            ]
        finally:
            for step in steps:
                if step.ends:
                    self._drop(step.id)

    def _begin(self, name: Id) -> States:
        self._drop(name)
        sequence = self._sequences[name] = States(self._initial, self._clock())
        return sequence

    def _drop(self, name: Id) -> None:
        sequence = self._sequences.pop(name, None)
        if sequence is not None:
            self.size -= sequence.size
            pool = self._storage.pool
            if sequence.slot >= 0 and pool is not None:
                pool.remove(sequence)

    def _update(
        self, run: Sequence[tuple[Step, States]], outcomes: Sequence[Outcome]
    ) -> list[Outcome]:
        """Store the new states of successful steps; return the outcomes for clients.

        If that raises, some states may be written and others not: all these sequences end.
        """
        now = self._clock()
        for _, sequence in run:  # first: memory for new states is taken from idle sequences
            sequence.used = now
        batches: dict[int, NewStates] = {}
        fetched: _Fetched = {}
        try:
            updated = [
                outcome
                if isinstance(outcome, BackendError)
                else self._update_one(step, sequence, outcome, batches, fetched)
                for (step, sequence), outcome in zip(run, outcomes, strict=True)
            ]
            pool = self._storage.pool
            for batch in batches.values():
                if batch.holders and pool is not None:
                    pool.write(batch.holders, batch.columns, batch.rows)
        except BaseException:
            for step, _ in run:
                self._drop(step.id)
            raise
        return updated

    def _update_one(
        self,
        step: Step,
        sequence: States,
        outcome: dict[str, Value],
        batches: dict[int, NewStates],
        fetched: _Fetched,
    ) -> Outcome:
        """Store the new states of one step, or mark them to be written; return its outcome."""
        refusal = None if step.ends else self._store(step.id, sequence, outcome, batches)
        fetches = bool(self._public) and not _on_gpu(step.item)
        for output in self._public:
            part: Value | Part = outcome[output]
            part = _fetch(part, fetched) if fetches else part
            outcome[output] = gather_scatter.part_value(part)
        for output in self._hidden:
            del outcome[output]
        return refusal or outcome

    def _reserve_memory(self, name: Id, sequence: States, size: int) -> StateMemoryError | None:
        """Count the bytes of a sequence's new states.

        Return the error if they exceed the limit, and log it once a minute.
        """
        total = self.size + size - sequence.size
        if total > self._limit:
            self._free()
            total = self.size + size - sequence.size
        if total <= self._limit:
            self.size, sequence.size = total, size
            return None
        count = len(self._sequences)
        error = StateMemoryError(self._model, str(name), total, self._limit_mb, count)
        self._refused += 1
        now = self._clock()
        if now >= self._next_warning:
            self._next_warning = now + _BETWEEN_WARNINGS_S
            log.warning(
                "%s Steps refused for that since the model was loaded: %d.",
                error,
                self._refused,
            )
        return error

    def _free(self) -> None:
        """Drop the sequences that Triton has forgotten.

        Triton measures the idle time from the arrival of a request, and does not report when it
        forgets a sequence. A request that arrived in time may still be queued. So an idle sequence
        is dropped only after the queue was empty, or after as many requests as it can hold ran.
        """
        now = self._clock()
        quiet = now - self._last_run > self._quiet
        for name, sequence in list(self._sequences.items()):
            if now - sequence.used <= self._idle:
                continue
            if sequence.requests_when_idle is None:
                sequence.requests_when_idle = self._requests
            if quiet or self._requests - sequence.requests_when_idle > self._backlog:
                self._drop(name)


def _rounds(steps: Sequence[Step]) -> list[list[int]]:
    """Return the positions of steps in rounds, each sequence once per round; skip slot fillers."""
    rounds: list[list[int]] = []
    numbers: Counter[Id] = Counter()
    for place, step in enumerate(steps):
        if step.id:
            if numbers[step.id] == len(rounds):
                rounds.append([])
            rounds[numbers[step.id]].append(place)
            numbers[step.id] += 1
    return rounds


def _on_gpu(item: Item) -> bool:
    """Return whether a request's numbers are on a GPU; false if it has none."""
    numbers = [v for v in item.values() if isinstance(v, Tensor) or not v.dtype.hasobject]
    return bool(numbers) and all(isinstance(value, Tensor) and value.is_cuda for value in numbers)


def _fetch(part: Value | Part, fetched: _Fetched) -> Value | Part:
    """Return a new state on the host."""
    column = part[0] if isinstance(part, tuple) else part
    if not isinstance(column, Tensor) or not column.is_cuda:
        return part
    if id(column) not in fetched:
        fetched[id(column)] = column, runtime.fetch(column)
    _, copy = fetched[id(column)]
    return (copy, part[1]) if isinstance(part, tuple) else copy


def _copy(outcome: Outcome) -> Outcome:
    if isinstance(outcome, BackendError):
        return outcome
    copies = {name: gather_scatter.clone(value) for name, value in outcome.items()}
    gather_scatter.wait(copies.values())
    return copies
