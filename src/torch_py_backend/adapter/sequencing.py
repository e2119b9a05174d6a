"""Read the steps of sequences from requests."""

from __future__ import annotations

from collections.abc import Sequence

import triton_python_backend_utils as pb_utils

from torch_py_backend.adapter import messages
from torch_py_backend.adapter.messages import Request
from torch_py_backend.config.model_config import Origin
from torch_py_backend.engine.engine import Engine
from torch_py_backend.pipeline import sequences
from torch_py_backend.pipeline.sequences import Sequences, Slots
from torch_py_backend.values import Item, RequestItem, Step


class SequenceReader:
    """Reads the requests of one instance's sequences.

    If the config has no states (the model keeps its own, by CORRID or by the position in the
    batch), all requests are run as they come, including those that only fill a slot.

    Attributes:
        sequences: the states of the sequences; None: the config has no states.
        steps: the stages that the pipeline needs; None: none.
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
        self._failures = engine.failures
        self.sequences: Sequences | None = None
        self.steps: Sequences | Slots | None = None
        if config.states:
            self.steps = self.sequences = Sequences(config, engine.device)
        elif config.keeps_slots:
            self.steps = Slots(config, engine.inputs.admit)

    def read(self, requests: Sequence[Request]) -> list[Item]:
        """Return the items of requests with their steps."""
        return [self._read(request) for request in requests]

    def _read(self, request: Request) -> Item:
        """Return a request's item with its step.

        A request that cannot be read still begins and ends its sequence: the next request must not
        get the state of an older sequence with the same ID. In slots it is returned with its error.
        """
        flags = request.flags()
        name = request.correlation_id()
        step = Step(name, bool(flags & self._starts), bool(flags & self._ends))
        self._fills |= not name
        if self.sequences is not None and not name:
            return RequestItem({}, step=step)
        try:
            item = messages.read_some(request, self._names)
        except Exception as error:
            if self.sequences is not None:
                self.sequences.skip(step)
            if self.sequences is not None or self.steps is None:
                raise
            step = step._replace(error=self._failures.unreadable(error))
            item = messages.read_some(request, self._names.difference(self._sent))
        if not name:
            sequences.blank(item, self._sent)
        return RequestItem(item, step=step)

    def count_sent(self, requests: Sequence[Request]) -> int:
        """Return how many of the requests were sent by clients and do not only fill a slot."""
        if not self._fills:
            return len(requests)
        return sum(1 for request in requests if request.correlation_id())
