"""Requests of sequences become steps; what idles is freed from beside.

Imported when an instance starts, not before: it needs torch, and Triton's utilities complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils
from torch import Tensor

from torch_py_backend.adapter import messages
from torch_py_backend.batching.gather_scatter import Item, Outcome
from torch_py_backend.config.model_config import Origin
from torch_py_backend.engine.engine import Engine
from torch_py_backend.sequences.state_store import Sequences, Step

_SECONDS = 1.0


class Sequencing:
    """How the requests of one instance's sequences are read and run.

    Without a state to keep (the model keeps its own, by CORRID or by its place in the batch), what
    Triton hands over is run as it comes, and that which only fills a slot with it.

    Attributes:
        run: one outcome for each request that was read; None: the engine runs items.
    """

    def __init__(self, engine: Engine) -> None:
        config = engine.config
        # Not the states: what Triton has in their place is memory that nobody has written.
        self._names = frozenset(
            spec.name for spec in config.inputs if spec.origin is not Origin.STATE
        )
        self._sent = [spec.name for spec in config.inputs if spec.origin is Origin.CLIENT]
        # Whether any request only filled a slot so far: to ask each for its id once more costs.
        self._fills = False
        self._starts = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        self._ends = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
        self._sequences: Sequences | None = None
        self.run: Callable[[Sequence[Any]], Sequence[Outcome]] | None = None
        self._left = threading.Event()
        if config.states:
            self._sequences = Sequences(config, engine.run_some, engine.device, guard=engine.guard)
            self.run = self._sequences.run
            self._thread = threading.Thread(target=self._tend, name="sequences", daemon=True)
            self._thread.start()

    @property
    def sequences(self) -> Sequences | None:
        """Whose states are kept; None: nothing is kept."""
        return self._sequences

    def read(self, request: Any) -> Item | Step:
        """A step of a sequence; an item, where nothing is kept.

        A request that cannot be read begins and ends its sequence all the same: to what Triton
        sends next, the state of an older sequence with the same id must not be given.
        """
        if self._sequences is None:
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
            self._sequences.skip(name, starts=starts, ends=ends)
            raise
        return Step(name, starts, ends, item)

    def asked(self, requests: Sequence[Any]) -> int:
        """How many of these are a client's: the others only fill a slot."""
        if not self._fills:
            return len(requests)
        return sum(1 for request in requests if request.correlation_id())

    def _blank(self, item: Item) -> Item:
        """What only fills a slot, with zeros: Triton sends memory that nobody has written."""
        for value in (item[name] for name in self._sent if name in item):
            if isinstance(value, Tensor):
                value.zero_()
            else:
                value.fill(b"" if value.dtype.hasobject else 0)
        return item

    def close(self) -> None:
        """End what goes on beside; to call it twice is no error."""
        self._left.set()
        if self._sequences is not None:
            self._thread.join()

    def _tend(self) -> None:
        sequences = self._sequences
        while sequences is not None and not self._left.wait(_SECONDS):
            sequences.sweep()
