"""Stages of sequences: states that are attached to a step, and replaced by its results.

A state is an additional input and output of an item. Steps of different sequences share batches as
other items do; Triton sends no step before the one before it is answered. A failed step replaces no
state, so it may be retried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torch_py_backend import values
from torch_py_backend.config.model_config import ModelConfig, Origin
from torch_py_backend.errors import BackendError, InputError, InternalError
from torch_py_backend.loading import initial_states
from torch_py_backend.pipeline.run import Entries, Entry, Result, Results
from torch_py_backend.values import Item, RequestItem, Step, Strings, Value, clone

# A state is kept for these seconds longer than Triton's idle time, unless new sequences need the
# place. Triton measures that from the arrival of a request, which may have been queued since, and
# does not report that it forgets a sequence.
GRACE_S = 60.0


@dataclass(eq=False, slots=True)
class _Sequence:
    """A live sequence: its states by the names of their inputs, and the time of its last step."""

    states: Item
    used: float


class Sequences:
    """The states of all sequences of one instance, on `device`; `clock` returns seconds."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._names = {state.input: state.output for state in config.states}
        public = {spec.name for spec in config.outputs if spec.origin is Origin.CLIENT}
        self._hidden = [output for output in self._names.values() if output not in public]
        rows = 1 if config.max_batch_size > 0 else None
        self._initial = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in initial_states.find(config, rows).items()
        }
        sequencing = config.sequencing
        assert sequencing is not None  # noqa: S101  only sequences have states
        self._idle, self._most = sequencing.idle_s, sequencing.most
        self._live: dict[int | str, _Sequence] = {}
        self._swept = clock()
        # Takes the place of a request that only fills a slot: it is not run.
        self._unsent = InternalError()

    def __len__(self) -> int:
        """Return the number of live sequences."""
        return len(self._live)

    def attach(self, entries: Entries) -> Entries:
        """Return the items with the states of their sequences; end those of last steps."""
        now = self._clock()
        attached = [
            entry if isinstance(entry, BackendError) else self._attached(entry, now)
            for entry in entries
        ]
        if now > self._swept + GRACE_S:  # free idle sequences, which Triton has forgotten
            self._swept = now
            self._live = {
                name: sequence
                for name, sequence in self._live.items()
                if now - sequence.used <= self._idle + GRACE_S
            }
        return attached

    def _attached(self, item: Item, now: float) -> Entry:
        step = values.step(item)
        if not step.id:
            return self._unsent
        # Also of a step that cannot be run: the next one must not get the state of an older
        # sequence with the same ID.
        sequence = self._begin(step)
        if step.error is not None:
            return step.error
        if sequence is None:
            return InputError(
                f"sequence {step.id} has no state here: it was not begun, or it idled too long, or"
                " the model was reloaded",
                expected="the START flag in the first request of a sequence",
            )
        sequence.used = now
        return item | sequence.states

    def _begin(self, step: Step) -> _Sequence | None:
        """Return the sequence of a step; None: it was not begun. The last step takes it away."""
        if step.starts:
            now = self._clock()
            if len(self._live) == self._most and step.id not in self._live:
                self._free_oldest(now)
            self._live[step.id] = _Sequence(self._initial, now)
        if step.ends:
            return self._live.pop(step.id, None)
        return self._live.get(step.id)

    def _free_oldest(self, now: float) -> None:
        """Free the sequence that is idle for longest: Triton has forgotten one of them."""
        name, oldest = min(self._live.items(), key=lambda entry: entry[1].used)
        if now - oldest.used > self._idle:
            del self._live[name]

    def keep(self, results: Results, entries: Entries) -> Results:
        """Keep the new states of steps that succeeded; return the results for clients."""
        now = self._clock()
        return [
            self._kept(result, entry, now) for result, entry in zip(results, entries, strict=True)
        ]

    def _kept(self, result: Result, entry: Entry, now: float) -> Result:
        if entry is self._unsent:
            return {}
        if isinstance(entry, BackendError) or isinstance(result, BackendError):
            return result
        sequence = self._live.get(values.step(entry).id)
        if sequence is not None:
            sequence.used = now
            sequence.states = {
                name: _kept_value(result[output]) for name, output in self._names.items()
            }
        for output in self._hidden:
            del result[output]
        return result


class Slots:
    """The steps of a model that keeps states itself, by their places in the batch.

    Triton's direct strategy gives each sequence a place. A refused request fills its place, too:
    those of others must not shift.

    Args:
        admit: returns an item as it is passed on, or the reason to refuse it.
    """

    def __init__(
        self,
        config: ModelConfig,
        admit: Callable[[Item], Item | InputError],
    ) -> None:
        self._sent = [spec.name for spec in config.inputs if spec.origin is Origin.CLIENT]
        controls = config.sequencing.controls if config.sequencing is not None else ()
        idle = [control for control in controls if control.idle is not None]
        self._idle = {control.name: control.idle for control in idle}
        self._admit = admit

    def attach(self, entries: Entries) -> Entries:
        """Return the items, with fillers in the places of refused ones."""
        items = [entry for entry in entries if not isinstance(entry, BackendError)]
        # Triton sends batches of equal shapes.
        shaped = next((item for item in items if values.step(item).error is None), None)
        return [
            entry if isinstance(entry, BackendError) else self._filled(entry, shaped)
            for entry in entries
        ]

    def _filled(self, item: Item, shaped: Item | None) -> Entry:
        """Return an item; if it is refused, one that only fills its slot, and keeps the error."""
        step = values.step(item)
        if shaped is None:
            return step.error or item
        admitted = step.error or self._admit(item)
        if not isinstance(admitted, BackendError):
            return item
        controls = {name: value for name, value in item.items() if name not in self._sent}
        if not step.starts:  # a first one begins its sequence
            for name, off in self._idle.items():
                if name in controls:
                    controls[name] = np.full_like(controls[name], off)
        filler = {name: clone(value) for name, value in shaped.items()}
        blank(filler, self._sent)
        return RequestItem(filler | controls, step=step._replace(error=admitted))

    def keep(self, results: Results, entries: Entries) -> Results:
        """Return the results, with the errors of refused items."""
        return [
            result if isinstance(entry, BackendError) else values.step(entry).error or result
            for result, entry in zip(results, entries, strict=True)
        ]


def blank(item: Item, names: Sequence[str]) -> None:
    """Zero inputs of a request that only fills a slot: their memory is uninitialized."""
    for value in (item[name] for name in names if name in item):
        if isinstance(value, Tensor):
            value.zero_()
        else:
            value.fill(b"" if value.dtype.hasobject else 0)


def _kept_value(value: Value) -> Value:
    """Return a copy, since the model may return views of memory that it writes again.

    Strings are encoded, as in requests.
    """
    if isinstance(value, Tensor):
        return value.clone()
    texts = value.reshape(-1).tolist()
    strings: Strings = np.empty(value.shape, dtype=np.object_)
    strings.ravel()[:] = [text if isinstance(text, bytes) else text.encode() for text in texts]
    return strings
