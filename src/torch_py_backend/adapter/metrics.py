"""Publish the metrics of an instance to Triton, as listed in `metric_families`.

Setting a metric in Triton takes 12 microseconds with the GIL held. So a thread publishes once a
second, and only values that have changed.

Triton keeps values until the server ends. Counters belong to a model and continue when it is loaded
again. Gauges belong to an instance and are 0 after it has ended.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import triton_python_backend_utils as pb_utils

from torch_py_backend.adapter import orphans
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import PlatformError
from torch_py_backend.observability import metric_families
from torch_py_backend.observability.metric_families import MetricKind
from torch_py_backend.processes.instance_status import InstanceStatus

if TYPE_CHECKING:  # these import torch, which completing a config does not need
    from torch_py_backend.engine.engine import Engine
    from torch_py_backend.engine.streams import Streams
    from torch_py_backend.pipeline.sequences import Sequences

log = logging.getLogger(__name__)

_SECONDS = 1.0
# The error of Triton's core if it was built without metrics.
_WITHOUT_METRICS = "metrics not supported"

# A series: its name, and its labels other than the instance's.
_Series: TypeAlias = "tuple[str, tuple[tuple[str, str], ...]]"
_Values: TypeAlias = "Iterator[tuple[_Series, float]]"


class Metric:
    """One series in Triton and its last published value.

    `more` has the values of labels that do not follow from the config.

    Attributes:
        supported: whether this server has metrics; known after the first one.
        grows: whether it is a counter.

    Raises:
        PlatformError: Triton refuses it.
    """

    supported: ClassVar[bool] = True

    def __init__(
        self, config: ModelConfig, name: str, more: tuple[tuple[str, str], ...] = ()
    ) -> None:
        row = metric_families.BY_NAME[name]
        known = {
            "model": config.name,
            "version": config.version,
            "model_instance": config.instance,
            **dict(more),
        }
        labels = {label: known[label] for label in row.labels if label in known}
        self.grows = row.kind is MetricKind.COUNTER
        # A gauge may have the value of an instance of the same name whose process died.
        self._published = 0.0 if self.grows else math.nan
        self._metric: Any = None
        if not Metric.supported:
            return
        family = pb_utils.MetricFamily
        try:
            handle = family(
                name=name,
                description=row.doc,
                kind=family.COUNTER if self.grows else family.GAUGE,
            )
            self._metric = handle.Metric(labels=labels)
        except pb_utils.TritonModelException as error:
            if _WITHOUT_METRICS not in str(error):
                reason = str(error).rpartition("message: ")[2]
                raise PlatformError(
                    f"Triton refuses the metric {name} ({reason})",
                    expected="a server where nothing else has a metric of that name and another"
                    " kind",
                    cure="Rename the metric of the model or backend that has it, and restart the"
                    " server: Triton keeps names until it ends.",
                ) from error
            Metric.supported = False
            return
        # Never freed, not even when the process ends: some servers then free memory that other
        # instances of the model still use, and crash (triton-inference-server/server#8663).
        for leaked in (handle, self._metric):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))

    def publish(self, value: float) -> None:
        """Set the value in Triton; increment a counter only if it has grown.

        Set a gauge even if its value is the same: an instance of the same name that ended since,
        as in a reload without a pause, has set it to 0.
        """
        if self._metric is None:
            return
        if self.grows:
            if value > self._published:
                self._metric.increment(value - self._published)
        elif value or self._published:
            self._metric.set(value)
        self._published = value


class Publisher:
    """Publishes an instance's counters and gauges until it is closed.

    Counts of the warm-up are not published.

    Raises:
        PlatformError: Triton refuses a metric.
    """

    def __init__(self, engine: Engine, status: InstanceStatus) -> None:
        self._engine = engine
        self._config = engine.config
        self._status = status
        self._streams: Streams | None = None
        self._sequences: Sequences | None = None
        self._warmed_up = dict(self._counted())
        self._metrics: dict[_Series, Metric] = {}
        self._poisoned = False
        self._publishes = True  # until Triton refuses a value
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.publish()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def follow(self, *, streams: Streams | None = None, sequences: Sequences | None = None) -> None:
        """Publish the metrics of the instance's streams or sequences; free idle sequences.

        Raises:
            PlatformError: Triton refuses a metric.
        """
        with self._lock:
            self._streams, self._sequences = streams, sequences
        self.publish()

    def publish(self) -> None:
        """Publish all current values. May be called in any thread."""
        with self._lock:
            # Gauges without a value any more become 0: all of them, once the instance has ended.
            gauges = {} if self._closed.is_set() else dict(self._gauges())
            for series, value in itertools.chain(self._counters(), gauges.items()):
                orphans.end_if_orphaned()
                metric = self._metrics.get(series)
                if metric is None:
                    metric = self._metrics[series] = Metric(self._config, *series)
                metric.publish(value)
                time.sleep(0)  # release the GIL for a request
            for series, metric in self._metrics.items():
                if not metric.grows and series not in gauges:
                    metric.publish(0)

    def poisoned(self) -> None:
        """Publish that the instance cannot answer requests any more."""
        self._poisoned = True
        self._try_publish()

    def close(self) -> None:
        """Publish the last counts and the end of the instance. May be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        self._try_publish()

    def _run(self) -> None:
        while not self._closed.wait(_SECONDS):
            if self._sequences is not None:
                self._sequences.sweep()
            self._publishes = self._publishes and self._try_publish()

    def _try_publish(self) -> bool:
        """Publish; log an exception instead of raising it, and return whether there was none."""
        try:
            self.publish()
        except Exception:  # from Triton
            log.exception("model '%s': publishing metrics failed.", self._config.name)
            return False
        return True

    # --- counters --------------------------------------------------------------------------------

    def _counters(self) -> _Values:
        for series, value in self._counted():
            yield series, value - self._warmed_up.get(series, 0)
        counts = self._engine.counts
        if self._engine.compiles:  # in the warm-up
            yield ("pytorch_py_compiled_graphs_total", ()), counts.compiled_graphs
            for result in ("hit", "miss"):
                loads = counts.compile_cache.get(result, 0)
                yield ("pytorch_py_compile_cache_total", (("result", result),)), loads
        streams = self._streams
        if streams is not None:
            yield ("pytorch_py_stream_responses_total", ()), counts.responses
            if streams.steps is not None:
                yield ("pytorch_py_stepped_streams_total", ()), streams.steps.streams

    def _counted(self) -> _Values:
        """Yield the totals of series that requests count."""
        counts = self._engine.counts
        for code in dict.fromkeys((*metric_families.CODES, *list(counts.requests))):
            yield ("pytorch_py_requests_total", (("code", code),)), counts.requests.get(code, 0)
        around = metric_families.HOOK_STAGES if self._engine.hooks is not None else ()
        for stage in (*metric_families.STAGES, *around):
            seconds: float = getattr(counts, f"{stage}_seconds")
            yield ("pytorch_py_stage_seconds_total", (("stage", stage),)), seconds
        totals = ["retried_rows"]
        rows = self._engine.rows
        if self._engine.padding is not None or rows.buckets or rows.least > 1:
            totals += ["rows", "filled_rows"]
        if self._engine.compiles:
            totals.append("eager_calls")
        for name in totals:
            yield (f"pytorch_py_{name}_total", ()), getattr(counts, name)

    # --- gauges ----------------------------------------------------------------------------------

    def _gauges(self) -> _Values:
        yield ("pytorch_py_poisoned", ()), self._poisoned
        yield ("pytorch_py_running_call_seconds", ()), self._status.running_seconds()
        if self._streams is not None:
            yield ("pytorch_py_live_streams", ()), self._streams.live
        if self._sequences is not None:
            yield ("pytorch_py_sequences", ()), len(self._sequences)
        for device, allocated in self._engine.memory():
            label = (("device", str(device)),)
            yield ("pytorch_py_device_memory_allocated_bytes", label), allocated
