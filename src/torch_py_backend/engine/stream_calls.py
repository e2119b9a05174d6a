"""The line as streams follow it: an item begins one, and what the model makes becomes outcomes.

Between the two the model goes on by itself, as often as it wants: `streams` and `continuous`, by
the stages that are here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.counters import Counts
from torch_py_backend.batching.gather_scatter import Item, Outcome, Value, rows_in
from torch_py_backend.batching.grouping import Intake
from torch_py_backend.batching.output_extraction import Finite
from torch_py_backend.batching.runtime import Runtime
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine.instrumentation import Stage
from torch_py_backend.engine.model_runner import Callee
from torch_py_backend.errors import BackendError, OutputError
from torch_py_backend.hooks.hooked_pipeline import Stages


@dataclass(frozen=True, slots=True)
class Given:
    """What a stream was begun with, which its outputs are measured by.

    Attributes:
        rows: the rows of its request.
        columns: its inputs, on the device.
    """

    rows: int
    columns: Sequence[Value]


class StreamCalls:
    """The stages of streams. Each is called within `Engine.calling`.

    Attributes:
        step: step() of a module that has one, for all live streams.
        advance: goes on with one stream: calls what it is given.

    Args:
        config: the model's config.
        intake: what makes arguments of items.
        callee: the model.
        surroundings: where it is.
        finite: refuses outputs with other than finite numbers; None: they are not looked at.
        counts: where calls and seconds are counted.
        step: the module's, if it has one.
    """

    def __init__(
        self,
        config: ModelConfig,
        intake: Intake | Stages,
        callee: Callee,
        surroundings: Runtime,
        finite: Finite | None,
        counts: Counts,
        step: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.step = step
        self.advance: Callable[[Callable[[], Any]], Any] = _call
        self._intake = intake
        self._callee = callee
        self._finite = finite
        self._counts = counts
        self._batched = config.max_batch_size > 0
        self._names = tuple(spec.name for spec in config.outputs)
        # Another stream's begin(), a second half's step(), and new weights may come before an
        # outcome is sent, and overwrite the memory that it shares with the model.
        self._owns = step is not None or config.options.watch_weights
        self._gather = gather_scatter.gather
        self._to_device = surroundings.to_device
        self._to_host: Callable[..., Sequence[Any]] = surroundings.to_host

    def stages(self) -> list[Stage]:
        """The stages of its own."""
        own = [
            ("gather", self, "_gather"),
            ("host to device", self, "_to_device"),
            ("next", self, "advance"),
            ("device to host", self, "_to_host"),
        ]
        return own if self.step is None else [*own, ("step", self, "step")]

    def begin(self, item: Item) -> tuple[Any, Given]:
        """What the model returns for one item, as it is: a stream.

        Raises:
            InputError: the item is not what the model takes.
        """
        assert isinstance(self._intake, Intake)  # noqa: S101  hooks around streams are refused
        admitted = self._intake.admit(item)
        if isinstance(admitted, BackendError):
            raise admitted
        (group,) = self._intake.group([(0, admitted)])
        began = time.perf_counter()
        batch = self._gather(group.items, group.inputs.names)
        gathered = time.perf_counter()
        columns = self._to_device(batch.columns)
        sent = time.perf_counter()
        given = Given(rows_in(columns), columns)
        passed = self._intake.convert(group.inputs, columns)
        result = group.inputs.call(self._callee.module, passed)
        counts = self._counts
        counts.forward_seconds += time.perf_counter() - sent
        counts.gather_seconds += gathered - began
        counts.host_to_device_seconds += sent - gathered
        counts.batch(given.rows if self._batched else 1)
        return result, given

    def outcomes(self, results: Sequence[tuple[Any, Given]]) -> list[Outcome]:
        """What streams have made, each as the config says."""
        taken = [self._taken(result, given.rows) for result, given in results]
        made = [
            value for values in taken if not isinstance(values, OutputError) for value in values
        ]
        came = [column for _, given in results for column in given.columns]
        began = time.perf_counter()
        fetched = self._to_host(made, came)
        if self._owns:
            fetched = [
                gather_scatter.own(value) if value is before else value
                for before, value in zip(made, fetched, strict=True)
            ]
            gather_scatter.wait(fetched)
        sent = iter(fetched)
        self._counts.device_to_host_seconds += time.perf_counter() - began
        return [
            values
            if isinstance(values, OutputError)
            else self._finite_only({name: next(sent) for name in self._names})
            for values in taken
        ]

    def _taken(self, result: Any, rows: int) -> list[Value] | OutputError:
        try:
            return self._callee.take(result, rows)
        except OutputError as error:
            return error

    def _finite_only(self, outcome: dict[str, Value]) -> Outcome:
        refusal = None if self._finite is None else self._finite.refusal(outcome)
        return outcome if refusal is None else refusal


def _call(resume: Callable[[], Any]) -> Any:
    return resume()
