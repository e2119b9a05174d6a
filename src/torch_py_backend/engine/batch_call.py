"""One batch: gather → copy to the device → call → extract outputs → copy to the host → scatter."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.gather_scatter import Batch, ItemRows, Outcome, Value, rows_in
from torch_py_backend.batching.grouping import Group
from torch_py_backend.batching.output_extraction import Finite
from torch_py_backend.batching.padding import Padding
from torch_py_backend.batching.ragged import Ragged
from torch_py_backend.batching.runtime import Runtime
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine.model_runner import ModelRunner
from torch_py_backend.engine.retry import reported
from torch_py_backend.errors import BackendError


class BatchCall:
    """Runs groups of items as one batch each.

    Args:
        padding: pads and cuts; None: nothing is padded.
        outputs: the names of the columns that the runner extracts.
        finite: checks outputs; None: they are not checked, or after hooks.
    """

    def __init__(
        self,
        config: ModelConfig,
        runner: ModelRunner,
        device_runtime: Runtime,
        *,
        padding: Padding | None,
        outputs: Sequence[str],
        finite: Finite | None,
    ) -> None:
        self.runner = runner
        self._runtime = device_runtime
        self._counts = runner.counts
        self._padding = padding
        self._outputs = outputs
        self.finite = finite
        self._pads = {name: pad.gather for name, pad in padding.pads.items()} if padding else {}
        ragged = self._ragged = Ragged(config) if config.concatenates else None
        self._state_inputs = frozenset(state.input for state in config.states)
        states = {state.output for state in config.states}
        self._state_places = [place for place, name in enumerate(outputs) if name in states]
        self.gather: Callable[..., Batch] = (
            gather_scatter.gather if ragged is None else ragged.gather
        )
        self.to_device = device_runtime.to_device
        self.to_host: Callable[..., Sequence[Any]] = device_runtime.to_host

    def run(self, group: Group, *, copy_outputs: bool) -> Sequence[Outcome]:
        """Run a group; raise whatever the model raises. See `retry.Attempt`."""
        names = group.inputs.names
        began = time.perf_counter()
        batch = self.gather(group.items, names, self._pads, self._state_inputs)
        shapes: Mapping[str, Sequence[int]] = {}
        if self._padding is not None:
            # Before the call: forward() may change shapes in place.
            shapes = {name: column.shape for name, column in zip(names, batch.columns, strict=True)}
        gathered = time.perf_counter()
        columns = self.to_device(batch.columns)
        sent = time.perf_counter()
        rows = rows_in(columns) if self._ragged is None else sum(batch.sizes)
        self._counts.rows += rows
        raw = self.runner.call(group.inputs, columns, rows)
        called = time.perf_counter()
        owned: Sequence[Value | ItemRows] = raw
        inputs = batch.columns
        if self._state_places:
            owned = list(raw)
            for place in self._state_places:
                owned[place] = gather_scatter.clone_rows(raw[place], batch.sizes)
            inputs = [
                column
                for name, column in zip(names, batch.columns, strict=True)
                if name not in self._state_inputs
            ]
        outputs = self.to_host(owned, inputs)
        if copy_outputs:
            outputs = self._kept(owned, outputs)
        fetched = time.perf_counter()
        outcomes = self._scatter(group, batch.sizes, shapes, outputs)
        # Inline: a method call would cost more than these additions.
        counts = self._counts
        counts.gather_seconds += gathered - began
        counts.host_to_device_seconds += sent - gathered
        counts.forward_seconds += called - sent
        counts.device_to_host_seconds += fetched - called
        if self.finite is None or self.finite.holds(outputs):
            return outcomes
        checked: list[Outcome] = []
        for outcome in outcomes:
            refusal = None if isinstance(outcome, BackendError) else self.finite.refusal(outcome)
            checked.append(outcome if refusal is None else reported(refusal))
        return checked

    def _kept(
        self, before: Sequence[Value | ItemRows], outputs: Sequence[Value | ItemRows]
    ) -> Sequence[Value | ItemRows]:
        """Copy outputs whose memory a later call may change.

        Outputs that `to_host` has copied are not those that the model returned (`before`).
        """
        return [
            self.runner.clone(value) if value is raw and not isinstance(value, ItemRows) else value
            for raw, value in zip(before, outputs, strict=True)
        ]

    def _scatter(
        self,
        group: Group,
        sizes: Sequence[int],
        shapes: Mapping[str, Sequence[int]],
        outputs: Sequence[Value | ItemRows],
    ) -> Sequence[Outcome]:
        """Return the outcomes; `sizes` are the rows of the items, `shapes` those of the columns."""
        if self._ragged is not None:
            outputs = self._ragged.split(group.items, outputs)
        outcomes = gather_scatter.scatter(outputs, self._outputs, sizes)
        if self._padding is not None:
            self._padding.cut(outcomes, group.items, shapes)
        return outcomes
