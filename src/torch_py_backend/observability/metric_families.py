"""The table of metric families in Triton's /metrics.

The adapter registers its rows, docs/metrics.md shows it, and the dashboard and the alerts use only
metrics of it. The kind of a metric must never change: Triton remembers a family until the server
exits, even if a newer version of this package is installed meanwhile, and may crash when it refuses
a family with another kind.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Without `model_instance`, all instances of a model add to one series. The label `instance` is
# reserved by Prometheus.
_MODEL = ("model", "version")
_INSTANCE = (*_MODEL, "model_instance")


class MetricKind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table.

    Attributes:
        name: the Prometheus name.
        doc: a description; Triton's HELP.
        labels: the names of its labels.
        kind: the type of the metric.
    """

    name: str
    doc: str
    labels: tuple[str, ...] = _MODEL
    kind: MetricKind = MetricKind.COUNTER


def _gauge(name: str, doc: str, *labels: str) -> Family:
    """Return a gauge with a series for each instance."""
    return Family(name, doc, (*_INSTANCE, *labels), MetricKind.GAUGE)


# The code of a request without an error.
OK = "OK"
# These exist from the beginning, so that Prometheus sees the first count as an increase.
CODES = (OK, "INVALID_ARG", "INTERNAL", "UNAVAILABLE", "CANCELLED")
STAGES = ("gather", "host_to_device", "forward", "device_to_host")
# The stages of models with hooks before and after STAGES.
HOOK_STAGES = ("preprocess", "postprocess")

TABLE = (
    Family(
        "pytorch_py_requests_total",
        "Requests that were answered, by the code of the response; OK for those without an error",
        (*_MODEL, "code"),
    ),
    Family(
        "pytorch_py_stage_seconds_total",
        "Seconds that successful batches spent in a stage",
        (*_MODEL, "stage"),
    ),
    Family(
        "pytorch_py_rows_total", "Rows in calls of the model, including rows that fill a bucket"
    ),
    Family("pytorch_py_filled_rows_total", "Rows that only fill a bucket"),
    Family(
        "pytorch_py_retried_rows_total",
        "Rows, or streams, that were run again because their batch failed",
    ),
    Family(
        "pytorch_py_compiled_graphs_total",
        "Graphs that torch.compile compiled, or found in its cache, before READY",
    ),
    Family(
        "pytorch_py_compile_cache_total",
        "Starts that found compiled graphs of an earlier start (hit), or had to compile (miss)",
        (*_MODEL, "result"),
    ),
    Family(
        "pytorch_py_eager_calls_total", "Calls after READY that needed a new graph and ran eagerly"
    ),
    Family("pytorch_py_stream_responses_total", "Responses of streams, without errors"),
    _gauge("pytorch_py_live_streams", "Streams of responses that have begun and not ended"),
    Family("pytorch_py_stepped_streams_total", "Streams in calls of step()"),
    _gauge("pytorch_py_sequences", "Sequences that have begun and not ended"),
    _gauge(
        "pytorch_py_device_memory_allocated_bytes",
        "Device memory in tensors of an instance",
        "device",
    ),
    _gauge(
        "pytorch_py_poisoned",
        "1 for an instance that had a fatal error and no longer answers requests",
    ),
    _gauge(
        "pytorch_py_running_call_seconds",
        "Seconds since the current call of the model's code began; 0 between calls",
    ),
)

BY_NAME = {row.name: row for row in TABLE}
