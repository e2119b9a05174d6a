"""State per correlation id: begun, given to each step, replaced by what it returns, freed.

A state is one more input and one more output of an item. So steps of different sequences share a
batch as other items do, and a step that fails may be tried again: it replaces nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.gather_scatter import Item, Outcome, Strings, Value
from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.errors import BackendError, InputError, StateMemoryError
from torch_py_backend.sequences import initial_states, row_pool
from torch_py_backend.sequences.row_pool import Form, Pool
from torch_py_backend.signature import binding
from torch_py_backend.signature.binding import Signature

log = logging.getLogger(__name__)

# A correlation id. Triton's requests that only fill a slot have 0, or no text.
Id: TypeAlias = "int | str"

# An instance that was not asked for so long has nothing in its queue; what came, was run.
_QUIET_S = 1.0
# A model that lacks memory refuses many steps in a second.
_BETWEEN_WARNINGS_S = 60.0
_MEGABYTE = 1 << 20


class Step(NamedTuple):
    """One request of a sequence.

    Attributes:
        id: the sequence.
        starts: it is the first one.
        ends: it is the last one.
        item: what the request brought.
    """

    id: Id
    starts: bool
    ends: bool
    item: Item


# --- at load -----------------------------------------------------------------------------------


def bound(config: ModelConfig, signature: Signature) -> ModelConfig:
    """The config with those controls among its inputs that forward() has a place for."""
    if config.sequencing is None or not config.sequencing.controls:
        return config
    names = [spec.name for spec in config.inputs]
    controls = {one.name: one for one in config.sequencing.controls}
    taken = binding.among(names, list(controls), signature)
    specs = (TensorSpec(name, controls[name].dtype, (1,), origin=Origin.CONTROL) for name in taken)
    return dataclasses.replace(config, inputs=(*config.inputs, *specs))


def following(config: ModelConfig, item: Item, outcome: dict[str, Value]) -> Item:
    """The item of the next step: the same, with what this one returned for its states."""
    return item | {
        state.input: gather_scatter.taken(outcome[state.output]) for state in config.states
    }


# --- while it serves ---------------------------------------------------------------------------


class _Kept:
    """What is kept of one sequence.

    Attributes:
        values: the states, by the names of the inputs that they will be.
        slot: where they are in the pool; negative: they are not.
        form: theirs, where they might be in one.
        size: bytes that they take; what all sequences begin with is nobody's.
        used: when its last step was done.
        passed: how many requests had been run when it was found idle; None: it was not.
    """

    __slots__ = ("form", "passed", "size", "slot", "used", "values")

    def __init__(self, values: Item, used: float) -> None:
        self.values = values
        self.slot = -1
        self.form: Form | None = None
        self.size = 0
        self.used = used
        self.passed: int | None = None


class _Batch:
    """Columns that the new states of several steps are rows of.

    Attributes:
        columns: one for each state.
        form: theirs; None: the rows cannot be in a pool.
        fits: whether it is the pool's.
        holders: those that keep their rows in the pool.
        rows: the rows of these.
    """

    __slots__ = ("columns", "fits", "form", "holders", "rows")

    def __init__(self, columns: Sequence[Any], form: Form | None, *, fits: bool) -> None:
        self.columns = columns
        self.form = form
        self.fits = fits
        self.holders: list[_Kept] = []
        self.rows: list[int] = []


class Sequences:
    """The states of all sequences of one instance.

    Attributes:
        size: bytes that they take.

    Args:
        config: the model's config.
        run: one outcome for each item, in their order; it is told at which places among all steps
            they stand.
        device: where states are kept.
        clock: seconds.
        guard: entered around what is done with them there.
    """

    def __init__(
        self,
        config: ModelConfig,
        run: Callable[[Sequence[Item], Sequence[int]], Sequence[Outcome]],
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        guard: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        sequencing = config.sequencing
        assert sequencing is not None  # noqa: S101  states belong to sequences
        self.size = 0
        self._model = config.name
        self._run_items = run
        self._clock = clock
        self._guard = guard
        self._inputs = [state.input for state in config.states]
        self._outputs = [state.output for state in config.states]
        self._first = self._outputs[0]
        self._texts = any(
            state.dtype is not None and state.dtype.torch is None for state in config.states
        )
        told = {spec.name for spec in config.outputs if spec.origin is Origin.CLIENT}
        self._hidden = [name for name in self._outputs if name not in told]
        self._told = [name for name in self._outputs if name in told]
        self._batched = config.max_batch_size > 0
        one_row = 1 if self._batched else None
        self._initial = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in initial_states.find(config, one_row).items()
        }
        fixed = all(
            state.dtype is not None and state.dtype.torch and -1 not in state.dims
            for state in config.states
        )
        # Counted once, where it is the same in all steps.
        self._fixed = sum(map(_size, self._initial.values())) if fixed else None
        limit = config.options.sequence_memory_mb
        self._limit_mb = limit or 0
        self._limit = math.inf if limit is None else limit * _MEGABYTE
        self._refused = 0
        self._silent_until = -math.inf
        self._quiet = _QUIET_S + sequencing.delay_s
        self._idle = sequencing.idle_s + self._quiet
        # As many requests may be waiting for an instance, and as many are being run.
        self._backlog = sequencing.slots + max(1, config.max_batch_size)
        self._kept: dict[Id, _Kept] = {}
        # Made with the first states that may be in one.
        self._pool: Pool | None = None
        self._passed = 0
        self._ended = clock()
        # Held while a batch is run: who frees what idles comes from another thread.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many sequences are live."""
        return len(self._kept)

    def run(self, steps: Sequence[Step]) -> list[Outcome]:
        """One outcome for each step, in their order; without the states that are nobody's output.

        What only fills a slot is not run, and its outcome holds nothing.
        """
        outcomes: list[Outcome] = [{} for _ in steps]
        with self._lock:
            rounds = list(_rounds(steps))
            for number, places in enumerate(rounds, 1):
                made = self._run([steps[place] for place in places], places)
                if number < len(rounds):  # the next round may overwrite what the model returned
                    with self._guard():
                        made = [_owned(outcome) for outcome in made]
                for place, outcome in zip(places, made, strict=True):
                    outcomes[place] = outcome
            self._passed += len(steps)
            self._ended = self._clock()
        return outcomes

    def skip(self, name: Id, *, starts: bool, ends: bool) -> None:
        """A step that cannot be run begins and ends its sequence all the same."""
        with self._lock:
            if starts:
                self._begin(name)
            if ends:
                self._drop(name)

    def sweep(self) -> None:
        """Free the states of which Triton can have no request any more."""
        if not self._lock.acquire(blocking=False):  # a batch is being run; the next time will do
            return
        try:
            self._free()
            if self._pool is not None:
                with self._guard():
                    self._pool.trim()
        finally:
            self._lock.release()

    def _run(self, steps: Sequence[Step], places: Sequence[int]) -> list[Outcome]:
        """The outcomes of steps of different sequences, which stand at these places."""
        found = [self._begin(step.id) if step.starts else self._kept.get(step.id) for step in steps]
        now = self._clock()
        run, ready, at = [], [], []
        for step, kept, place in zip(steps, found, places, strict=True):
            if kept is not None:
                kept.used, kept.passed = now, None
                run.append((step, kept))
                ready.append(step.item | kept.values)
                at.append(place)
        try:
            made = self._run_items(ready, at) if ready else ()
            with self._guard():
                settled = iter(self._settle(run, made))
            return [
                self._unknown(step) if kept is None else next(settled)
                for step, kept in zip(steps, found, strict=True)
            ]
        finally:
            for step in steps:
                if step.ends:
                    self._drop(step.id)

    def _begin(self, name: Id) -> _Kept:
        self._drop(name)
        kept = self._kept[name] = _Kept(self._initial, self._clock())
        return kept

    def _drop(self, name: Id) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self.size -= kept.size
            self._leave(kept)

    def _leave(self, kept: _Kept) -> None:
        if kept.slot >= 0 and self._pool is not None:
            self._pool.leave(kept)

    def _settle(self, run: Sequence[tuple[Step, _Kept]], made: Sequence[Outcome]) -> list[Outcome]:
        """What clients get; a step that went well has replaced the state."""
        now = self._clock()
        batches: dict[int, _Batch] = {}
        settled = [
            outcome
            if isinstance(outcome, BackendError)
            else self._settle_one(step, kept, outcome, batches, now)
            for (step, kept), outcome in zip(run, made, strict=True)
        ]
        try:
            for batch in batches.values():
                if batch.holders and self._pool is not None:
                    self._pool.write(batch.holders, batch.columns, batch.rows)
        except BaseException:  # what was replaced by half is nobody's state
            for step, _ in run:
                self._drop(step.id)
            raise
        return settled

    def _settle_one(
        self,
        step: Step,
        kept: _Kept,
        outcome: dict[str, Any],
        batches: dict[int, _Batch],
        now: float,
    ) -> Outcome:
        kept.used = now
        if not step.ends:
            first = outcome[self._first]
            batch, row = None, 0
            if type(first) is tuple:
                column, row = first
                batch = batches.get(id(column))
                if batch is None:
                    batch = self._batch([outcome[name] for name in self._outputs])
                    batches[id(column)] = batch
            if batch is not None and batch.fits and kept.slot >= 0:
                batch.holders.append(kept)
                batch.rows.append(row)
            else:
                refusal = self._keep(step, kept, outcome, batch, row)
                if refusal is not None:
                    return refusal
        for output in self._told:
            outcome[output] = gather_scatter.taken(outcome[output])
        for output in self._hidden:
            del outcome[output]
        return outcome

    def _batch(self, values: Sequence[Any]) -> _Batch:
        columns = [one[0] if type(one) is tuple else one for one in values]
        if self._fixed is not None and self._pool is not None:  # all have its form
            return _Batch(columns, self._pool.form, fits=True)
        small = self._batched and all(
            isinstance(one, Tensor) and one.nbytes <= gather_scatter.SMALL_BYTES * one.shape[0]
            for one in columns
        )
        form = row_pool.form(columns) if small else None
        return _Batch(columns, form, fits=self._pool is not None and self._pool.form == form)

    def _keep(
        self, step: Step, kept: _Kept, outcome: Mapping[str, Any], batch: _Batch | None, row: int
    ) -> StateMemoryError | None:
        """Keep a state that is not in the pool, or does not stay there; or say what it lacks.

        A step that ran alone has a copy of its own: to write that into a table would cost more.
        """
        values = [gather_scatter.taken(outcome[name]) for name in self._outputs]
        if self._texts:
            values = [_as_input(value) for value in values]
        size = sum(map(_size, values)) if self._fixed is None else self._fixed
        total = self.size + size - kept.size
        if total > self._limit:
            self._free()
            total = self.size + size - kept.size
        if total > self._limit:
            return self._refuse(step, total)
        self.size, kept.size = total, size
        self._leave(kept)
        form = None if batch is None else batch.form
        # What grows would leave the pool with each step.
        if (
            batch is not None
            and form is not None
            and (self._fixed is not None or kept.form == form)
        ):
            if self._pool is None:
                self._pool = Pool(self._inputs, batch.columns)
            if self._pool.form == form:
                self._pool.enter(kept)
                batch.holders.append(kept)
                batch.rows.append(row)
                return None
        kept.form = form
        kept.values = {
            name: gather_scatter.own(value) if type(outcome[output]) is tuple else value
            for name, output, value in zip(self._inputs, self._outputs, values, strict=True)
        }
        return None

    def _refuse(self, step: Step, total: int) -> StateMemoryError:
        """What a step gets that memory does not suffice for; the log is told now and then."""
        error = StateMemoryError(self._model, str(step.id), total, self._limit_mb, len(self._kept))
        self._refused += 1
        now = self._clock()
        if now >= self._silent_until:
            self._silent_until = now + _BETWEEN_WARNINGS_S
            log.warning(
                "%s So many steps were refused for that since the model was loaded: %d.",
                error,
                self._refused,
            )
        return error

    def _unknown(self, step: Step) -> InputError:
        return InputError(
            self._model,
            f"sequence {step.id} has no state here: it was not begun, or it idled too long, or the"
            " model was loaded anew",
            expected="the START flag in the first request of a sequence",
        )

    def _free(self) -> None:
        """Let go of the sequences that Triton has forgotten.

        Triton counts the idle time from when a request came, and tells nobody when it forgets a
        sequence. What came in time may still wait in its queue for as long as others are run: so
        what idles is only freed when the queue was empty since, or all that it can hold was run.
        """
        now = self._clock()
        quiet = now - self._ended > self._quiet
        for name, kept in list(self._kept.items()):
            if now - kept.used <= self._idle:
                continue
            if kept.passed is None:
                kept.passed = self._passed
            if quiet or self._passed - kept.passed > self._backlog:
                self._drop(name)


def _rounds(steps: Sequence[Step]) -> Iterator[Sequence[int]]:
    """The places of the steps, less those that fill slots: no sequence twice in a round."""
    places: Sequence[int] = [place for place, step in enumerate(steps) if step.id]
    while places:
        first: dict[Id, int] = {}
        for place in places:
            first.setdefault(steps[place].id, place)
        now = list(first.values())
        yield now
        if len(now) == len(places):
            return
        done = set(now)
        places = [place for place in places if place not in done]


def _owned(outcome: Outcome) -> Outcome:
    if isinstance(outcome, BackendError):
        return outcome
    kept = {name: gather_scatter.own(value) for name, value in outcome.items()}
    gather_scatter.wait(kept.values())
    return kept


def _as_input(value: Value) -> Value:
    """Strings as requests bring them, in bytes."""
    if isinstance(value, Tensor):
        return value
    strings: Strings = np.empty(value.shape, dtype=np.object_)
    strings.ravel()[:] = [
        one if isinstance(one, bytes) else one.encode() for one in value.reshape(-1).tolist()
    ]
    return strings


def _size(value: Value) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(len, value.reshape(-1).tolist()))
