"""Read the steps of sequences from requests; free idle sequences in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils
from torch import Tensor

from torch_py_backend.adapter import messages
from torch_py_backend.adapter.messages import Request
from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import Item, Outcome
from torch_py_backend.config.model_config import Origin
from torch_py_backend.engine.engine import Engine
from torch_py_backend.sequences.state_store import Sequences, Step

_SECONDS = 1.0


class SequenceReader:
    """Reads and runs the requests of one instance's sequences.

    If the config has no states (the model keeps its own, by CORRID or by the position in the
    batch), all requests are run as they come, including those that only fill a slot.

    Attributes:
        sequences: the states of the sequences; None: the config has no states.
        run: runs what `read` has returned; returns one outcome for each.
    """

    def __init__(self, engine: Engine) -> None:
        config = engine.config
        # Without states: Triton passes uninitialized memory for them.
        self._names = frozenset(
            spec.name for spec in config.inputs if spec.origin is not Origin.STATE
        )
        self._sent = [spec.name for spec in config.inputs if spec.origin is Origin.CLIENT]
        # Whether any request so far only filled a slot: reading each one's ID again takes time.
        self._fills = False
        self._starts = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        self._ends = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
        self._guard = engine.guard
        self.sequences: Sequences | None = None
        self.run: Callable[[Sequence[Any]], Sequence[Outcome]] = engine.run
        self._closed = threading.Event()
        if config.states:
            self.sequences = Sequences(config, engine.run, engine.device, guard=self._guard)
            self.run = self.sequences.run
            self._thread = threading.Thread(
                target=self._sweep,
                args=(self.sequences, runtime.for_thread(engine.device)),
                name="sequences",
                daemon=True,
            )
            self._thread.start()

    def read(self, request: Request) -> Item | Step:
        """Return a request's step; its item if the config has no states.

        A request that cannot be read still begins and ends its sequence: the next request must not
        get the state of an older sequence with the same ID.
        """
        if self.sequences is None:
            if request.correlation_id():
                return messages.read_some(request, self._names)
            self._fills = True
            return self._blank(messages.read_some(request, self._names))
        flags = request.flags()
        name = request.correlation_id()
        starts, ends = bool(flags & self._starts), bool(flags & self._ends)
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

    def _blank(self, item: Item) -> Item:
        """Zero the inputs of a request that only fills a slot: their memory is uninitialized."""
        for value in (item[name] for name in self._sent if name in item):
            if isinstance(value, Tensor):
                with self._guard():  # on the stream that the model reads it on
                    value.zero_()
            else:
                value.fill(b"" if value.dtype.hasobject else 0)
        return item

    def close(self) -> None:
        """Stop the thread. May be called twice."""
        self._closed.set()
        if self.sequences is not None:
            self._thread.join()

    def _sweep(self, sequences: Sequences, enter: Callable[[], None]) -> None:
        enter()
        while not self._closed.wait(_SECONDS):
            sequences.sweep()
