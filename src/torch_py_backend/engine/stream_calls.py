"""The engine's calls for streams: begin a stream with an item, turn its results into outcomes.

The package `streaming` resumes the streams in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_py_backend.errors import BackendError, OutputError
from torch_py_backend.pipeline.run import Stages
from torch_py_backend.values import Item, Outcome, Value, clone

if TYPE_CHECKING:
    from torch_py_backend.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class StreamInputs:
    """The inputs of a stream, which its outputs are checked against.

    Attributes:
        rows: the rows of the request.
        on_gpu: whether its outputs stay on the GPU, where all inputs were.
    """

    rows: int
    on_gpu: bool


class StreamCalls:
    """The calls of streams. Make each within `Engine.calling`.

    Attributes:
        step: the module's step(), which runs all live streams; None: it has none.
    """

    def __init__(self, engine: Engine, stages: Stages) -> None:
        self.step = engine.loaded.step
        self._stages = stages
        self._names, self._finite = engine.outputs.names, engine.outputs.finite
        self._counts, self._host_inputs = engine.counts, engine.runtime.host_inputs

    def begin(self, item: Item) -> tuple[Any, StreamInputs]:
        """Call the model for one item; return its result, a stream, and the stream's inputs.

        Raises:
            InputError: the item is not what the model takes.
        """
        (entry,), groups = self._stages.group([item])
        if isinstance(entry, BackendError):
            raise entry
        began = time.perf_counter()
        columns, sizes = groups[0].gather(groups[0].items)
        gathered = sent = time.perf_counter()
        on_gpu = not self._host_inputs and all(
            column.is_cuda for column in columns if isinstance(column, Tensor)
        )
        if self._stages.send is not None:
            columns = self._stages.send(columns)
            sent = time.perf_counter()
        result = groups[0].call(*columns)
        counts = self._counts
        counts.forward_seconds += time.perf_counter() - sent
        counts.gather_seconds += gathered - began
        counts.host_to_device_seconds += sent - gathered
        return result, StreamInputs(sum(sizes), on_gpu)

    def outcomes(self, results: Sequence[tuple[object, StreamInputs]]) -> list[Outcome]:
        """Return the outcomes for results of streams, checked against the config."""
        return [self._outcome(result, inputs) for result, inputs in results]

    def _outcome(self, result: object, inputs: StreamInputs) -> Outcome:
        try:
            values = self._stages.extract(result, inputs.rows)
        except OutputError as error:
            return error
        began = time.perf_counter()
        if self._stages.fetch is not None:
            values = self._stages.fetch(values)
        if not inputs.on_gpu and not self._host_inputs:
            values = [value.cpu() if isinstance(value, Tensor) else value for value in values]
        if self.step is not None:
            # The begin() of another stream or a further step() may overwrite memory that an outcome
            # shares with the model before the outcome is sent.
            values = [clone(value) for value in values]
        self._counts.device_to_host_seconds += time.perf_counter() - began
        outcome: dict[str, Value] = dict(zip(self._names, values, strict=True))
        refusal = None if self._finite is None else self._finite.refusal(outcome)
        return outcome if refusal is None else refusal
