"""Stages of sequences: states that are attached to a step, and replaced by its results.

A state is an additional input and output of an item. Steps of different sequences share batches as
other items do; Triton sends no step before the one before it is answered. A failed step replaces no
state, so it may be retried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_py_backend import values
from torch_py_backend.config.model_config import ModelConfig, Origin
from torch_py_backend.errors import BackendError, InputError, UnavailableError
from torch_py_backend.loading import example_inputs
from torch_py_backend.pipeline.run import Entries, Entry, Group, GroupStage, Results
from torch_py_backend.values import Call, Item

# A state is kept for these seconds longer than Triton's idle time, unless new sequences need the
# place. Triton measures that from the arrival of a request, which may have been queued since, and
# does not report that it forgets a sequence.
GRACE_S = 60.0


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
            for name, value in example_inputs.initial_states(config, rows).items()
        }
        sequencing = config.sequencing
        assert sequencing is not None  # noqa: S101  only sequences have states
        self._idle, self._most = sequencing.idle_s, sequencing.most
        # The states of each by the names of their inputs, and the time of its last step; the one
        # whose last step is the oldest comes first.
        self._live: dict[int | str, tuple[Item, float]] = {}
        # Takes the place of a request that only fills a slot: it is not run.
        self._unsent = UnavailableError("the request is not a step of a sequence")

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
        while self._live:  # free what Triton has forgotten
            name, (_, used) = next(iter(self._live.items()))
            grace = GRACE_S if len(self._live) <= self._most else 0.0
            if now - used <= self._idle + grace:
                break
            del self._live[name]
        return attached

    def _attached(self, item: Item, now: float) -> Entry:
        step = values.step(item)
        if not step.id:
            return self._unsent
        # Also of a step that cannot be run: the next one must not get the state of an older
        # sequence with the same ID.
        states, _ = self._live.pop(step.id, (None, now))
        if step.starts:
            states = self._initial
        if states is not None and not step.ends:
            self._live[step.id] = states, now
        if step.error is not None:
            return step.error
        if states is None:
            return InputError(
                f"sequence {step.id} has no state here: it was not begun, or it idled too long, or"
                " the model was reloaded",
                expected="the START flag in the first request of a sequence",
            )
        return item | states

    def keep(self, guarded: Call, results: Results, entries: Entries) -> Results:
        """Keep the new states of steps that succeeded; return the results for clients."""
        kept = list(results)
        for at, result in enumerate(results):
            if not isinstance(result, BackendError):
                kept[at] = guarded(entries[at], self._kept, result, entries[at])
        return kept

    def _kept(self, result: Item, item: Item) -> Item:
        """Keep the states of one step; return what its client gets."""
        name = values.step(item).id
        if name in self._live:
            # Copies: the model may return views of memory that it writes again.
            states = {state: values.clone(result[of]) for state, of in self._names.items()}
            self._live[name] = states, self._clock()
        return {output: result[output] for output in result if output not in self._hidden}


def whole(group: GroupStage) -> GroupStage:
    """Return a stage that groups no item of a batch of which one is refused.

    It is for models that keep states by the place in the batch: a row less would shift the others.
    """
    others = UnavailableError("another request of its batch was refused", cure="Send it again.")

    def group_whole(entries: Entries) -> tuple[Entries, Sequence[Group]]:
        entries, groups = group(entries)
        if not any(isinstance(entry, BackendError) for entry in entries):
            return entries, groups
        return [entry if isinstance(entry, BackendError) else others for entry in entries], ()

    return group_whole
