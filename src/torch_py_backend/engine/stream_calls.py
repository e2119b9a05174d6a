"""The engine's calls for streams: begin a stream with an item, turn its results into outcomes.

The package `streaming` resumes the streams in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.gather_scatter import Item, Outcome, Value, rows_in
from torch_py_backend.batching.grouping import Grouping
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine.batch_call import BatchCall
from torch_py_backend.errors import BackendError, OutputError
from torch_py_backend.hooks.hooked_pipeline import HookedPipeline


@dataclass(frozen=True, slots=True)
class StreamInputs:
    """The inputs of a stream, which its outputs are checked against.

    Attributes:
        rows: the rows of the request.
        columns: the inputs as they were sent: its outputs go to where they were.
    """

    rows: int
    columns: Sequence[Value]


class StreamCalls:
    """The calls of streams. Make each within `Engine.calling`.

    Attributes:
        step: the module's step(), which runs all live streams; None: it has none.
    """

    def __init__(
        self,
        config: ModelConfig,
        grouping: Grouping | HookedPipeline,
        batch_call: BatchCall,
        step: Callable[[list[Any]], Any] | None,
    ) -> None:
        self._runner = batch_call.runner
        self._finite = batch_call.finite
        self._counts = batch_call.runner.counts
        self._names = tuple(spec.name for spec in config.outputs)
        # The begin() of another stream or a further step() may overwrite memory that an outcome
        # shares with the model before the outcome is sent.
        self._owns = step is not None
        self.step = step
        self._gather = batch_call.gather
        self._to_device, self._to_host = batch_call.to_device, batch_call.to_host
        if isinstance(grouping, Grouping):  # hooks are refused for streams
            self._admit, self._group = grouping.admit, grouping.group

    def begin(self, item: Item) -> tuple[Any, StreamInputs]:
        """Call the model for one item; return its result, a stream, and the stream's inputs.

        Raises:
            InputError: the item is not what the model takes.
        """
        admitted = self._admit(item)
        if isinstance(admitted, BackendError):
            raise admitted
        (group,) = self._group([(0, admitted)])
        began = time.perf_counter()
        batch = self._gather(group.items, group.inputs.names)
        gathered = time.perf_counter()
        columns = self._to_device(batch.columns)
        sent = time.perf_counter()
        inputs = StreamInputs(rows_in(columns), batch.columns)
        passed = self._runner.convert(group.inputs, columns)
        result = group.inputs.call(self._runner.forward, passed)
        counts = self._counts
        counts.forward_seconds += time.perf_counter() - sent
        counts.gather_seconds += gathered - began
        counts.host_to_device_seconds += sent - gathered
        return result, inputs

    def outcomes(self, results: Sequence[tuple[object, StreamInputs]]) -> list[Outcome]:
        """Return the outcomes for results of streams, checked against the config."""
        extracted: list[Sequence[Value] | OutputError] = []
        for result, inputs in results:
            try:
                extracted.append(self._runner.extract(result, inputs.rows))
            except OutputError as error:
                extracted.append(error)
        outputs = [
            value for values in extracted if not isinstance(values, OutputError) for value in values
        ]
        columns = [column for _, inputs in results for column in inputs.columns]
        began = time.perf_counter()
        fetched = self._to_host(outputs, columns)
        if self._owns:
            fetched = [
                gather_scatter.clone(value) if value is before else value
                for before, value in zip(outputs, fetched, strict=True)
            ]
        values_left = iter(fetched)
        self._counts.device_to_host_seconds += time.perf_counter() - began
        outcomes: list[Outcome] = []
        for values in extracted:
            if isinstance(values, OutputError):
                outcomes.append(values)
                continue
            outcome = {name: next(values_left) for name in self._names}
            refusal = None if self._finite is None else self._finite.refusal(outcome)
            outcomes.append(outcome if refusal is None else refusal)
        return outcomes
