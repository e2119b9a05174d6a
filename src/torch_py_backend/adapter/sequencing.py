"""Read the steps of sequences from requests; free idle sequences in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from torch import Tensor

from torch_py_backend.adapter import messages
from torch_py_backend.adapter.messages import Request
from torch_py_backend.config.model_config import Origin
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError
from torch_py_backend.pipeline.sequences import Sequences, Step
from torch_py_backend.values import Item, Outcome, clone

_SECONDS = 1.0


class _Unreadable(dict[str, Any]):
    """The controls of a request whose inputs cannot be read."""

    error: BackendError


class SequenceReader:
    """Reads and runs the requests of one instance's sequences.

    If the config has no states (the model keeps its own, by CORRID or by the position in the
    batch), all requests are run as they come, including those that only fill a slot. With the
    direct strategy, a refused request also fills its slot: those of others must not shift.

    Attributes:
        sequences: the states of the sequences; None: the config has no states.
        run: runs what `read` has returned; returns one outcome for each.
    """

    def __init__(self, engine: Engine, *, traced: bool = False) -> None:
        config = engine.config
        self._run_items = engine.pipeline(traced=traced)
        # Without states: Triton passes uninitialized memory for them.
        self._names = frozenset(
            spec.name for spec in config.inputs if spec.origin is not Origin.STATE
        )
        self._sent = [spec.name for spec in config.inputs if spec.origin is Origin.CLIENT]
        # Whether any request so far only filled a slot: reading each one's ID again takes time.
        self._fills = False
        self._starts = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        self._ends = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
        self._engine = engine
        self._in_slots = config.keeps_slots
        controls = config.sequencing.controls if config.sequencing is not None else ()
        self._idle = {entry.name: entry.idle for entry in controls if entry.idle is not None}
        self.sequences: Sequences | None = None
        self.run: Callable[[Sequence[Any]], Sequence[Outcome]] = self._run_items
        self._closed = threading.Event()
        if config.states:
            self.sequences = Sequences(config, self._run_items, engine.device)
            self.run = self.sequences.run
            self._thread = threading.Thread(
                target=self._sweep, args=(self.sequences,), name="sequences", daemon=True
            )
            self._thread.start()
        elif self._in_slots:
            self.run = self._run_in_slots

    def read(self, request: Request) -> Item | Step:
        """Return a request's step; its item if the config has no states.

        A request that cannot be read still begins and ends its sequence: the next request must not
        get the state of an older sequence with the same ID.
        """
        flags = request.flags()
        name = request.correlation_id()
        starts, ends = bool(flags & self._starts), bool(flags & self._ends)
        if self.sequences is None:
            self._fills |= not name
            item = self._read_with_slot(request)
            item = item if name else self._blank(item)
            return Step(name, starts, ends, item) if self._in_slots else item
        if not name:
            self._fills = True
            return Step(name, starts, ends, {})
        try:
            item = messages.read_some(request, self._names)
        except Exception:
            self.sequences.skip(name, starts=starts, ends=ends)
            raise
        return Step(name, starts, ends, item)

    def count_sent(self, requests: Sequence[Request]) -> int:
        """Return how many of the requests were sent by clients and do not only fill a slot."""
        if not self._fills:
            return len(requests)
        return sum(1 for request in requests if request.correlation_id())

    def _read_with_slot(self, request: Request) -> Item:
        """Return a request's item; if it cannot be read but has a slot, its controls."""
        try:
            return messages.read_some(request, self._names)
        except Exception as error:
            if not self._in_slots:
                raise
            controls = self._names.difference(self._sent)
            item = _Unreadable(messages.read_some(request, controls))
            item.error = self._engine.failures.unreadable(error)
        return item

    def _run_in_slots(self, steps: Sequence[Step]) -> Sequence[Outcome]:
        """Run steps of a model that keeps states by their places; refused ones fill their slots."""
        # Triton sends batches of equal shapes.
        readable = (step.item for step in steps if not isinstance(step.item, _Unreadable))
        shaped: Item = next(readable, {})
        items: list[Item] = []
        refused: dict[int, BackendError] = {}
        for place, step in enumerate(steps):
            item = step.item
            admitted = (
                item.error if isinstance(item, _Unreadable) else self._engine.inputs.admit(item)
            )
            if isinstance(admitted, BackendError):
                refused[place] = admitted
                item = self._fill(step, shaped)
            items.append(item)
        outcomes = self._run_items(items) if shaped else [*refused.values()]
        return [refused.get(place, outcome) for place, outcome in enumerate(outcomes)]

    def _fill(self, step: Step, shaped: Item) -> Item:
        """Return an item that only fills a refused step's slot; a first one begins its sequence."""
        copies = {name: clone(value) for name, value in shaped.items()}
        controls = {name: step.item[name] for name in step.item if name not in self._sent}
        if not step.starts:
            idle = self._idle.items()
            controls |= {n: np.full_like(controls[n], off) for n, off in idle if n in controls}
        return self._blank(copies) | controls

    def _blank(self, item: Item) -> Item:
        """Zero the inputs of a request that only fills a slot: their memory is uninitialized."""
        for value in (item[name] for name in self._sent if name in item):
            if isinstance(value, Tensor):
                value.zero_()
            else:
                value.fill(b"" if value.dtype.hasobject else 0)
        return item

    def close(self) -> None:
        """Stop the thread. May be called twice."""
        self._closed.set()
        if self.sequences is not None:
            self._thread.join()

    def _sweep(self, sequences: Sequences) -> None:
        while not self._closed.wait(_SECONDS):
            sequences.sweep()
