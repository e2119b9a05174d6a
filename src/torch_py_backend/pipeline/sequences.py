"""State per correlation ID: initialized, passed to each step, replaced by its result, freed.

A state is an additional input and output of an item. Steps of different sequences share batches as
other items do. A failed step replaces no state, so it may be retried.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.config.model_config import ModelConfig, Origin
from torch_py_backend.errors import BackendError, InputError
from torch_py_backend.loading import initial_states
from torch_py_backend.values import Item, Outcome, Strings, Value, clone

# A correlation ID. Requests with which Triton only fills a slot have 0 or an empty string.
Id: TypeAlias = "int | str"

# After this many seconds without a run, the instance's queue in Triton is empty.
_QUIET_S = 1.0


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


@dataclass(eq=False, slots=True)
class _Sequence:
    """A live sequence.

    Attributes:
        states: its states by the names of their inputs.
        used: the time of its last step.
        requests_when_idle: the number of requests run when it was found idle; None: it was not.
    """

    states: Item
    used: float
    requests_when_idle: int | None = None


class Sequences:
    """The states of all sequences of one instance.

    Args:
        run: runs items, returns their outcomes in order, in which states are copies.
        device: the device of the states.
        clock: returns seconds.
    """

    def __init__(
        self,
        config: ModelConfig,
        run: Callable[[Sequence[Item]], Sequence[Outcome]],
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        sequencing = config.sequencing
        assert sequencing is not None  # noqa: S101  only sequences have states
        self._model = config.name
        self._run_items = run
        self._clock = clock
        self._names = {state.input: state.output for state in config.states}
        self._public = {spec.name for spec in config.outputs if spec.origin is Origin.CLIENT}
        rows = 1 if config.max_batch_size > 0 else None
        self._initial = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in initial_states.find(config, rows).items()
        }
        self._quiet = _QUIET_S + sequencing.delay_s
        self._idle = sequencing.idle_s + self._quiet
        # The most requests that may be queued for an instance or running in it.
        self._backlog = sequencing.slots + max(1, config.max_batch_size)
        self._live: dict[Id, _Sequence] = {}
        self._requests = 0
        self._last_run = clock()
        # Held while a batch runs: another thread calls `sweep`.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of live sequences."""
        return len(self._live)

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
                self._live.pop(name, None)

    def sweep(self) -> None:
        """Drop the sequences that Triton has forgotten.

        Triton measures the idle time from the arrival of a request, and does not report when it
        forgets a sequence. A request that arrived in time may still be queued. So an idle sequence
        is dropped only after the queue was empty, or after as many requests as it can hold ran.
        """
        if not self._lock.acquire(blocking=False):  # a batch is running; the next sweep will do
            return
        try:
            now = self._clock()
            quiet = now - self._last_run > self._quiet
            for name, sequence in list(self._live.items()):
                if now - sequence.used <= self._idle:
                    continue
                if sequence.requests_when_idle is None:
                    sequence.requests_when_idle = self._requests
                if quiet or self._requests - sequence.requests_when_idle > self._backlog:
                    del self._live[name]
        finally:
            self._lock.release()

    def _run_round(self, steps: Sequence[Step]) -> list[Outcome]:
        """Run steps of different sequences."""
        sequences = [
            self._begin(step.id) if step.starts else self._live.get(step.id) for step in steps
        ]
        items = [
            step.item | sequence.states
            for step, sequence in zip(steps, sequences, strict=True)
            if sequence is not None
        ]
        try:
            results = iter(self._run_items(items) if items else ())
            return [
                self._refusal(step) if sequence is None else self._keep(step, sequence, results)
                for step, sequence in zip(steps, sequences, strict=True)
            ]
        finally:
            for step in steps:
                if step.ends:
                    self._live.pop(step.id, None)

    def _begin(self, name: Id) -> _Sequence:
        sequence = self._live[name] = _Sequence(self._initial, self._clock())
        return sequence

    def _refusal(self, step: Step) -> InputError:
        return InputError(
            self._model,
            f"sequence {step.id} has no state here: it was not begun, or it idled too long, or the"
            " model was reloaded",
            expected="the START flag in the first request of a sequence",
        )

    def _keep(self, step: Step, sequence: _Sequence, results: Iterator[Outcome]) -> Outcome:
        """Keep the new states of a step that succeeded; return its outcome for the client."""
        sequence.used, sequence.requests_when_idle = self._clock(), None
        outcome = next(results)
        if isinstance(outcome, BackendError):
            return outcome
        states = {name: _as_sent(outcome[output]) for name, output in self._names.items()}
        for output in self._names.values():
            if output not in self._public:
                del outcome[output]
            elif not _on_gpu(step.item):
                outcome[output] = _on_host(outcome[output])
        sequence.states = states
        return outcome


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


def _on_host(value: Value) -> Value:
    return value.cpu() if isinstance(value, Tensor) else value


def _as_sent(value: Value) -> Value:
    """Return strings encoded, as in requests; numbers unchanged."""
    if isinstance(value, Tensor):
        return value
    strings: Strings = np.empty(value.shape, dtype=np.object_)
    strings.ravel()[:] = [
        text if isinstance(text, bytes) else text.encode() for text in value.reshape(-1).tolist()
    ]
    return strings


def _copy(outcome: Outcome) -> Outcome:
    if isinstance(outcome, BackendError):
        return outcome
    return {name: clone(value) for name, value in outcome.items()}
