"""Publish the metrics of an instance to Triton, as listed in `engine.metrics`.

Setting a metric in Triton takes 12 microseconds with the GIL held. So a thread publishes once a
second, and only values that have changed.

Triton keeps values until the server ends. Counters belong to a model and continue when it is loaded
again. Gauges belong to an instance and are 0 after it has ended.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import time
from typing import Any, ClassVar

import triton_python_backend_utils as pb_utils

from torch_py_backend.adapter import logs
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.metrics import TABLE, Family, Sources
from torch_py_backend.engine.streams import Streams
from torch_py_backend.errors import PlatformError
from torch_py_backend.pipeline.sequences import Sequences
from torch_py_backend.processes.instance_status import InstanceStatus

log = logging.getLogger(__name__)

_SECONDS = 1.0
# The error of Triton's core if it was built without metrics.
_WITHOUT_METRICS = "metrics not supported"


class Metric:
    """One series in Triton and its last published value.

    Attributes:
        supported: whether this server has metrics; known after the first one.

    Args:
        value: the value of the family's own label.

    Raises:
        PlatformError: Triton refuses it.
    """

    supported: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, row: Family, value: str) -> None:
        known = {
            "model": config.name,
            "version": config.version,
            "model_instance": config.instance,
            row.label: value,
        }
        self._grows = row.grows
        # A gauge may have the value of an instance of the same name whose process died.
        self._published = 0.0 if row.grows else math.nan
        self._metric: Any = None
        if not Metric.supported:
            return
        family = pb_utils.MetricFamily
        try:
            kind = family.COUNTER if row.grows else family.GAUGE
            handle = family(name=row.name, description=row.doc, kind=kind)
            self._metric = handle.Metric(labels={label: known[label] for label in row.labels})
        except pb_utils.TritonModelException as error:
            if _WITHOUT_METRICS not in str(error):
                reason = str(error).rpartition("message: ")[2]
                raise PlatformError(
                    f"Triton refuses the metric {row.name} ({reason})",
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
        if self._grows:
            if value > self._published:
                self._metric.increment(value - self._published)
        elif value or self._published:
            self._metric.set(value)
        self._published = value


class Publisher:
    """Publishes an instance's counters and gauges until it is closed; frees idle sequences.

    Raises:
        PlatformError: Triton refuses a metric.
    """

    def __init__(self, engine: Engine, status: InstanceStatus) -> None:
        self._config = engine.config
        self._sources = Sources(engine, status)
        self._before = {row.name: row.read(self._sources) for row in TABLE if not row.of_load}
        self._metrics: dict[tuple[str, str], Metric] = {}
        self._publishes = True  # until Triton refuses a value
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.publish()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def follow(self, *, streams: Streams | None = None, sequences: Sequences | None = None) -> None:
        """Publish the metrics of the instance's streams or sequences from now on.

        Raises:
            PlatformError: Triton refuses a metric.
        """
        with self._lock:
            self._sources.streams, self._sources.sequences = streams, sequences
        self.publish()

    def publish(self) -> None:
        """Publish all current values. May be called in any thread."""
        with self._lock:
            for row in TABLE:
                self._publish_row(row)

    def _publish_row(self, row: Family) -> None:
        # Gauges without a value any more become 0: all of them, once the instance has ended.
        values: dict[str, float] = {
            value: 0 for name, value in self._metrics if name == row.name and not row.grows
        }
        if row.grows or not self._closed.is_set():
            values |= row.read(self._sources)
        before = self._before.get(row.name, {}) if row.grows else {}
        for label, value in values.items():
            logs.end_if_orphaned()
            metric = self._metrics.get((row.name, label))
            if metric is None:
                metric = self._metrics[row.name, label] = Metric(self._config, row, label)
            metric.publish(value - before.get(label, 0))
            time.sleep(0)  # release the GIL for a request

    def poisoned(self) -> None:
        """Publish that the instance cannot answer requests any more."""
        self._sources.poisoned = True
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
            if self._sources.sequences is not None:
                self._sources.sequences.sweep()
            self._publishes = self._publishes and self._try_publish()

    def _try_publish(self) -> bool:
        """Publish; log an exception instead of raising it, and return whether there was none."""
        try:
            self.publish()
        except Exception:  # from Triton
            log.exception("publishing metrics failed.")
            return False
        return True
