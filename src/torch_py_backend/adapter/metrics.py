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
from typing import Any, TypeAlias

import triton_python_backend_utils as pb_utils

from torch_py_backend.adapter import logs
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.metrics import TABLE, Family, Sources, Values
from torch_py_backend.processes.instance_status import InstanceStatus

log = logging.getLogger(__name__)

_SECONDS = 1.0
# The error of Triton's core if it was built without metrics.
_WITHOUT_METRICS = "metrics not supported"

_Series: TypeAlias = "dict[tuple[str, str], tuple[Any, float]]"


class Publisher:
    """Publishes an instance's counters and gauges until it is closed.

    Attributes:
        sources: what is published; complete when the publisher starts.
    """

    def __init__(self, engine: Engine, status: InstanceStatus) -> None:
        self.sources = Sources(engine, status)
        # What was counted before, as by the warm-up.
        self._before = {row.name: row.read(self.sources) for row in TABLE if not row.of_load}
        # Triton's metrics and their last values, by the name of the family and its own label. None:
        # this server has no metrics.
        self._series: _Series | None = {}
        self._publishes = True  # until Triton refuses a value
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Publish for the first time, and then periodically.

        Raises:
            TritonModelException: Triton refuses a metric.
        """
        self.publish()
        self._thread.start()

    def publish(self) -> None:
        """Publish all current values. May be called in any thread."""
        with self._lock:
            for row in TABLE:
                if self._series is not None:
                    self._publish_row(row, self._series)

    def _publish_row(self, row: Family, series: _Series) -> None:
        # Gauges without a value any more become 0: all of them, once the instance has ended.
        values: dict[str, float] = {}
        for name, label in series:
            if name == row.name and not row.grows:
                values[label] = 0
        if row.grows or not self._closed.is_set():
            values.update(row.read(self.sources))
        before: Values = self._before.get(row.name, {}) if row.grows else {}
        for label, current in values.items():
            logs.end_if_orphaned()
            if (row.name, label) not in series:
                metric = self._create(row, label)
                if metric is None:
                    self._series = None
                    return
                # A gauge may have the value of an instance of the same name whose process died.
                series[row.name, label] = metric, 0.0 if row.grows else math.nan
            metric, published = series[row.name, label]
            value = current - before.get(label, 0)
            if row.grows and value > published:
                metric.increment(value - published)
            elif not row.grows and (value or published):
                # Also the same value: an instance of the same name that ended since, as in a reload
                # without a pause, has set it to 0.
                metric.set(value)
            series[row.name, label] = metric, value
            time.sleep(0)  # release the GIL for a request

    def _create(self, row: Family, label: str) -> Any:
        """Return Triton's metric for a family and the value of its own label; None: it has none."""
        config = self.sources.engine.config
        known = {
            "model": config.name,
            "version": config.version,
            "model_instance": config.instance,
            row.label: label,
        }
        kinds = pb_utils.MetricFamily
        kind = kinds.COUNTER if row.grows else kinds.GAUGE
        try:
            family = kinds(name=row.name, description=row.doc, kind=kind)
            metric = family.Metric(labels={name: known[name] for name in row.labels})
        except pb_utils.TritonModelException as error:
            if _WITHOUT_METRICS in str(error):
                return None
            raise
        # Never freed, not even when the process ends: some servers then free memory that other
        # instances of the model still use, and crash (triton-inference-server/server#8663).
        for leaked in (family, metric):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))
        return metric

    def close(self) -> None:
        """Publish the last counts and the end of the instance. May be called twice."""
        if self._thread.is_alive():
            self._closed.set()
            self._thread.join()
            self.try_publish()

    def _run(self) -> None:
        while not self._closed.wait(_SECONDS):
            logs.end_if_orphaned()
            self._publishes = self._publishes and self.try_publish()

    def try_publish(self) -> bool:
        """Publish; log an exception instead of raising it, and return whether there was none."""
        try:
            self.publish()
        except Exception:  # from Triton
            log.exception("publishing metrics failed.")
            return False
        return True
