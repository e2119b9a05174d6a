"""The metrics of an instance in Triton's /metrics: a table whose rows read their values.

A name must never change between a counter (`_total`) and a gauge: Triton keeps families and values
until the server ends. Counters belong to a model and continue when it is loaded again. Gauges
belong to an instance and are 0 after it has ended.

Setting a metric takes 12 microseconds with the GIL held. So a thread publishes once a second.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sized
from typing import Any, NamedTuple

import triton_python_backend_utils as pb_utils

from torch_py_backend.adapter import logs
from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import summarize
from torch_py_backend.processes.instance_status import InstanceStatus

log = logging.getLogger(__name__)

_SECONDS = 1.0
_STAGES = ("preprocess", "gather", "host_to_device", "forward", "device_to_host", "postprocess")


class Family(NamedTuple):
    """A row of the table.

    Attributes:
        name: the Prometheus name.
        doc: a description; Triton's HELP.
        read: returns the present values by its own label, "" without; empty: it has no series.
        label: the label that it has beside those of the model or the instance; empty: none.
    """

    name: str
    doc: str
    read: Callable[[Publisher], Mapping[str, float]]
    label: str = ""

    @property
    def grows(self) -> bool:
        """Whether it is a counter of the model, not a gauge of the instance."""
        return self.name.endswith("_total")

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        # Counters of all instances of a model add to one series. Prometheus reserves `instance`.
        instance = () if self.grows else ("model_instance",)
        return ("model", "version", *instance, *([self.label] if self.label else []))


def _counter(field: str, doc: str, label: str = "") -> Family:
    """Return the row of a field of `Counts`, which is a dict if the family has a label."""

    def read(of: Publisher) -> Mapping[str, float]:
        count = getattr(of.engine.counts, field)
        return dict(count) if label else {"": count}

    return Family(f"pytorch_py_{field}_total", doc, read, label)


TABLE: tuple[Family, ...] = (
    _counter(
        "requests",
        "Requests that were answered, by the code of the response; OK for those without an error",
        "code",
    ),
    Family(
        "pytorch_py_stage_seconds_total",
        "Seconds that batches spent in a stage, without calls that failed",
        lambda of: {stage: getattr(of.engine.counts, f"{stage}_seconds") for stage in _STAGES},
        "stage",
    ),
    _counter("rows", "Rows in calls of the model, including rows that fill a bucket"),
    _counter("filled_rows", "Rows that only fill a bucket"),
    _counter("retried_rows", "Rows, or streams, that were run again because their batch failed"),
    _counter(
        "compiled_graphs", "Graphs that torch.compile compiled, or found in its cache, before READY"
    ),
    _counter(
        "compile_cache",
        "Starts that found compiled graphs of an earlier start (hit), or had to compile (miss)",
        "result",
    ),
    _counter("eager_calls", "Calls after READY that needed a new graph and ran eagerly"),
    _counter("stream_responses", "Responses of streams, without errors"),
    Family(
        "pytorch_py_live_streams",
        "Streams of responses that have begun and not ended",
        lambda of: {"": len(of.streams)},
    ),
    _counter("stepped_streams", "Streams in calls of step()"),
    Family(
        "pytorch_py_sequences",
        "Sequences whose states are kept",
        lambda of: {"": len(of.sequences)},
    ),
    Family(
        "pytorch_py_device_memory_allocated_bytes",
        "Device memory in tensors of an instance",
        lambda _: {str(device): allocated for device, allocated in runtime.memory()},
        "device",
    ),
    Family(
        "pytorch_py_poisoned",
        "1 for an instance that had a fatal error and no longer answers requests",
        lambda of: {"": of.engine.failures.fatal is not None},
    ),
    Family(
        "pytorch_py_running_call_seconds",
        "Seconds since the current call of the model's code began; 0 between calls",
        lambda of: {"": of.status.running_seconds()},
    ),
)


class Publisher:
    """Publishes an instance's counters and gauges until it is closed, or Triton refuses one."""

    streams: Sized = ()  # those that are live
    sequences: Sized = ()  # those with states

    def __init__(self, engine: Engine, status: InstanceStatus) -> None:
        self.engine: Engine = engine
        self.status: InstanceStatus = status
        # Triton's metrics and their last values, by the family's name and the value of its label.
        self._series: dict[tuple[str, str], tuple[Any, float]] = {}
        self._table = TABLE  # empty once Triton has refused a value
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Publish for the first time, and then periodically."""
        self.publish()
        self._thread.start()

    def close(self) -> None:
        """Publish the last counts and the end of the instance. May be called twice."""
        if self._thread.is_alive():
            self._closed.set()
            self._thread.join()

    def publish(self) -> None:
        """Publish all current values; the last time if Triton refuses one."""
        try:
            for row in self._table:
                # Gauges without a value any more become 0.
                known = [label for name, label in self._series if name == row.name]
                for label, value in {**dict.fromkeys(known, 0.0), **row.read(self)}.items():
                    self._publish(row, label, value)
        except Exception as error:
            log.warning("no more metrics are published: %s.", summarize(error))
            self._table = ()

    def _publish(self, row: Family, label: str, value: float) -> None:
        logs.end_if_orphaned()
        key = row.name, label
        if key not in self._series:
            config = self.engine.config
            kinds = pb_utils.MetricFamily
            kind = kinds.COUNTER if row.grows else kinds.GAUGE
            family = kinds(name=row.name, description=row.doc, kind=kind)
            values = config.name, config.version, *([] if row.grows else [config.instance]), label
            metric = family.Metric(labels=dict(zip(row.labels, values, strict=False)))
            # Never freed, not even when the process ends: some servers then free memory that other
            # instances of the model still use, and crash (triton-inference-server/server#8663).
            for leaked in (family, metric):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))
            self._series[key] = metric, 0.0 if row.grows else math.nan
        metric, before = self._series[key]
        if row.grows:
            if value > before:
                metric.increment(value - before)
        else:
            value = 0.0 if self._closed.is_set() else value
            # Also the same value: an instance of the same name that ended since, as in a reload
            # without a pause, has set it to 0. A 0 is set once: a server that ends never answers.
            if value or before:
                metric.set(value)
        self._series[key] = metric, value
        time.sleep(0)  # release the GIL for a request

    def _run(self) -> None:
        closed = False
        while not closed:
            closed = self._closed.wait(_SECONDS)
            logs.end_if_orphaned()
            self.publish()
