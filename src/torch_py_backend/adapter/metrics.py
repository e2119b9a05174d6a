"""The metrics of an instance in Triton's /metrics: a table whose rows read their values.

docs/metrics.md shows the rows, and the dashboard and the alerts use only these. A name must never
change between a counter (`_total`) and a gauge: Triton remembers a family until the server exits,
even if a newer version of this package is installed meanwhile.

Setting a metric in Triton takes 12 microseconds with the GIL held. So a thread publishes once a
second. Triton keeps values until the server ends. Counters belong to a model and continue when it
is loaded again. Gauges belong to an instance and are 0 after it has ended.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import triton_python_backend_utils as pb_utils

from torch_py_backend.adapter import logs
from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.streams import Streams
from torch_py_backend.errors import summarize
from torch_py_backend.pipeline.run import CODES
from torch_py_backend.pipeline.sequences import Sequences
from torch_py_backend.processes.instance_status import InstanceStatus

log = logging.getLogger(__name__)

_SECONDS = 1.0
# Without `model_instance`, all instances of a model add to one series. The label `instance` is
# reserved by Prometheus.
_MODEL = ("model", "version")
# The values of a family by its own label, "" where it has none; empty: the instance has no series.
Values: TypeAlias = "Mapping[str, float]"


Read: TypeAlias = "Callable[[Publisher], Values]"


class Family(NamedTuple):
    """A row of the table.

    Attributes:
        name: the Prometheus name.
        doc: a description; Triton's HELP.
        read: returns the present values.
        label: the label that it has beside those of the model or the instance; empty: none.
    """

    name: str
    doc: str
    read: Read
    label: str = ""

    @property
    def grows(self) -> bool:
        """Whether it is a counter of the model, not a gauge of the instance."""
        return self.name.endswith("_total")

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        instance = () if self.grows else ("model_instance",)
        return (*_MODEL, *instance, *([self.label] if self.label else []))


def _requests(of: Publisher) -> Values:
    # These exist from the beginning, so that Prometheus sees the first count as an increase.
    return dict.fromkeys(CODES, 0) | of.engine.counts.requests


def _stage_seconds(of: Publisher) -> Values:
    stages = ["gather", "host_to_device", "forward", "device_to_host"]
    if of.engine.hooks is not None:
        stages += ["preprocess", "postprocess"]
    return {stage: getattr(of.engine.counts, f"{stage}_seconds") for stage in stages}


def _compile_cache(of: Publisher) -> Values:
    return {"hit": 0, "miss": 0} | of.engine.counts.compile_cache if of.engine.compiles else {}


def _stepped_streams(of: Publisher) -> Values:
    stepped = of.streams.stepped if of.streams is not None else None
    return {"": stepped} if stepped is not None else {}


def _counted(field: str, applies: Callable[[Publisher], bool] = lambda _: True) -> Read:
    """Return the function that reads a field of `Counts`, if it applies to the model."""
    return lambda of: {"": getattr(of.engine.counts, field)} if applies(of) else {}


def _fills_rows(of: Publisher) -> bool:
    rows = of.engine.rows
    return of.engine.padding is not None or bool(rows.buckets) or rows.least > 1


def _compiles(of: Publisher) -> bool:
    return of.engine.compiles


TABLE = (
    Family(
        "pytorch_py_requests_total",
        "Requests that were answered, by the code of the response; OK for those without an error",
        _requests,
        "code",
    ),
    Family(
        "pytorch_py_stage_seconds_total",
        "Seconds that successful batches spent in a stage",
        _stage_seconds,
        "stage",
    ),
    Family(
        "pytorch_py_rows_total",
        "Rows in calls of the model, including rows that fill a bucket",
        _counted("rows", _fills_rows),
    ),
    Family(
        "pytorch_py_filled_rows_total",
        "Rows that only fill a bucket",
        _counted("filled_rows", _fills_rows),
    ),
    Family(
        "pytorch_py_retried_rows_total",
        "Rows, or streams, that were run again because their batch failed",
        _counted("retried_rows"),
    ),
    Family(
        "pytorch_py_compiled_graphs_total",
        "Graphs that torch.compile compiled, or found in its cache, before READY",
        _counted("compiled_graphs", _compiles),
    ),
    Family(
        "pytorch_py_compile_cache_total",
        "Starts that found compiled graphs of an earlier start (hit), or had to compile (miss)",
        _compile_cache,
        "result",
    ),
    Family(
        "pytorch_py_eager_calls_total",
        "Calls after READY that needed a new graph and ran eagerly",
        _counted("eager_calls", _compiles),
    ),
    Family(
        "pytorch_py_stream_responses_total",
        "Responses of streams, without errors",
        _counted("responses", lambda of: of.streams is not None),
    ),
    Family(
        "pytorch_py_live_streams",
        "Streams of responses that have begun and not ended",
        lambda of: {} if of.streams is None else {"": of.streams.live},
    ),
    Family("pytorch_py_stepped_streams_total", "Streams in calls of step()", _stepped_streams),
    Family(
        "pytorch_py_sequences",
        "Sequences whose states are kept",
        lambda of: {} if of.sequences is None else {"": len(of.sequences)},
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

BY_NAME = {row.name: row for row in TABLE}


class Publisher:
    """Publishes an instance's counters and gauges until it is closed.

    Attributes:
        streams: the streams of a decoupled model, set before the start.
        sequences: the states of a model with sequences, set before the start.
    """

    def __init__(self, engine: Engine, status: InstanceStatus) -> None:
        self.engine: Engine = engine
        self.status: InstanceStatus = status
        self.streams: Streams | None = None
        self.sequences: Sequences | None = None
        # Triton's metrics, by the name of the family and the value of its own label.
        self._metrics: dict[tuple[str, str], Any] = {}
        self._before: dict[tuple[str, str], float] = {}  # their last values
        self._publishes = True
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
            for row in TABLE:
                self._publish(row)
        except Exception as error:
            log.warning("no more metrics are published: %s.", summarize(error))
            self._publishes = False

    def _publish(self, row: Family) -> None:
        # Gauges without a value any more become 0: all of them, once the instance has ended.
        values = dict.fromkeys(
            [label for name, label in self._metrics if name == row.name and not row.grows], 0.0
        )
        if row.grows or not self._closed.is_set():
            values.update(row.read(self))
        for label, value in values.items():
            logs.end_if_orphaned()
            self._set(row, label, value)
            time.sleep(0)  # release the GIL for a request

    def _set(self, row: Family, label: str, value: float) -> None:
        series = row.name, label
        if series not in self._metrics:
            self._metrics[series] = self._create(row, label)
        before = self._before.get(series, 0.0 if row.grows else math.nan)
        if row.grows and value > before:
            self._metrics[series].increment(value - before)
        # Also the same value: an instance of the same name that ended since, as in a reload without
        # a pause, has set it to 0. A 0 is set once: a server that ends meanwhile never answers.
        elif not row.grows and (value or before):
            self._metrics[series].set(value)
        self._before[series] = value

    def _create(self, row: Family, label: str) -> Any:
        """Return Triton's metric for a family and the value of its own label."""
        config = self.engine.config
        known = {
            "model": config.name,
            "version": config.version,
            "model_instance": config.instance,
            row.label: label,
        }
        kinds = pb_utils.MetricFamily
        kind = kinds.COUNTER if row.grows else kinds.GAUGE
        family = kinds(name=row.name, description=row.doc, kind=kind)
        metric = family.Metric(labels={name: known[name] for name in row.labels})
        # Never freed, not even when the process ends: some servers then free memory that other
        # instances of the model still use, and crash (triton-inference-server/server#8663).
        for leaked in (family, metric):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))
        return metric

    def _run(self) -> None:
        closed = False
        while not closed:
            closed = self._closed.wait(_SECONDS)
            logs.end_if_orphaned()
            if self._publishes:
                self.publish()
