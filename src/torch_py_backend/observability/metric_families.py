"""The table of metric families in Triton's /metrics.

The adapter registers its rows, docs/metrics.md shows it, and the dashboard and the alerts use only
metrics of it. The kind of a metric must never change: Triton remembers a family until the server
exits, even if a newer version of this package is installed meanwhile, and may crash when it refuses
a family with another kind.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class MetricKind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    # Counters with the names and labels of a histogram's series; docs/metrics.md has the reason.
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table.

    Attributes:
        name: the Prometheus name; a histogram's without `_bucket`, `_sum` and `_count`.
        kind: the type of the metric.
        labels: the names of its labels.
        unit: the unit of its values.
        models: the models that report it.
        doc: a description; Triton's HELP.
        hint: what a change means and what to do.
    """

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    unit: str
    models: str
    doc: str
    hint: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names of the series that are scraped."""
        if self.kind is not MetricKind.HISTOGRAM:
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


# Without `model_instance`, all instances of a model add to one series. The label `instance` is
# reserved by Prometheus.
_MODEL = ("model", "version")
_INSTANCE = (*_MODEL, "model_instance")
_ALL = "all models"
_FILLING = "`BATCH_BUCKETS`, `PAD`, or a program with fixed rows"
_COMPILED = "models that are compiled"
_DECOUPLED = "decoupled models"
_STEPPED = "decoupled models with `step()`"
_CUDA = "instances on CUDA devices"
_STATES = "models with states"

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
        MetricKind.COUNTER,
        (*_MODEL, "code"),
        "requests",
        _ALL,
        "Requests that were answered, by the code of the response; OK for those without an error",
        "INTERNAL: the model raises, see the server's log. UNAVAILABLE: memory runs out, or an"
        " instance is poisoned. INVALID_ARG: clients send invalid requests. CANCELLED: clients time"
        " out, look at the queue.",
    ),
    Family(
        "pytorch_py_batch_rows",
        MetricKind.HISTOGRAM,
        (*_MODEL, "le"),
        "rows",
        _ALL,
        "Rows of each successful batch, without rows that fill a bucket",
        "All in the first bucket under load: requests are not batched, look at dynamic_batching."
        " All in the last: a larger max_batch_size may pay.",
    ),
    Family(
        "pytorch_py_stage_seconds_total",
        MetricKind.COUNTER,
        (*_MODEL, "stage"),
        "seconds",
        _ALL,
        "Seconds that successful batches spent in a stage",
        "Look at the stage that grows: forward is the model; gather (of a plain model on the CPU"
        " also reading the requests) grows with many small requests;"
        " host_to_device and device_to_host grow with large tensors on a GPU.",
    ),
    Family(
        "pytorch_py_rows_total",
        MetricKind.COUNTER,
        _MODEL,
        "rows",
        _FILLING,
        "Rows in calls of the model, including rows that fill a bucket",
        "The denominator of filled_rows_total.",
    ),
    Family(
        "pytorch_py_filled_rows_total",
        MetricKind.COUNTER,
        _MODEL,
        "rows",
        _FILLING,
        "Rows that only fill a bucket",
        "Above a quarter of rows_total: choose other buckets, see batch_rows.",
    ),
    Family(
        "pytorch_py_values_total",
        MetricKind.COUNTER,
        _MODEL,
        "values",
        _FILLING,
        "Values of padded inputs in calls of the model",
        "The denominator of padded_values_total.",
    ),
    Family(
        "pytorch_py_padded_values_total",
        MetricKind.COUNTER,
        _MODEL,
        "values",
        _FILLING,
        "Values that are padding",
        "Above half of values_total: lengths differ too much within a batch; smaller batches, or a"
        " second model for long inputs, may be faster.",
    ),
    Family(
        "pytorch_py_retried_rows_total",
        MetricKind.COUNTER,
        _MODEL,
        "rows",
        _ALL,
        "Rows, or streams, that were run again because their batch failed",
        "Invalid requests share batches with valid ones, or memory runs out: see requests_total.",
    ),
    Family(
        "pytorch_py_memory_splits_total",
        MetricKind.COUNTER,
        _MODEL,
        "times",
        _ALL,
        "Times that memory ran out and a batch was split",
        "Use a smaller max_batch_size, fewer instances, or CUDA_MEMORY_FRACTION.",
    ),
    Family(
        "pytorch_py_compiled_graphs_total",
        MetricKind.COUNTER,
        _MODEL,
        "graphs",
        _COMPILED,
        "Graphs that torch.compile compiled, or found in its cache, before READY",
        "It increases when an instance starts, and never while it serves.",
    ),
    Family(
        "pytorch_py_compile_cache_total",
        MetricKind.COUNTER,
        (*_MODEL, "result"),
        "starts",
        _COMPILED,
        "Starts that found compiled graphs of an earlier start (hit), or had to compile (miss)",
        "A miss at every start: the cache is not kept, see COMPILE_CACHE_DIR and the server's log.",
    ),
    Family(
        "pytorch_py_eager_calls_total",
        MetricKind.COUNTER,
        _MODEL,
        "calls",
        "models that are compiled, or captured in CUDA graphs",
        "Calls after READY that needed a new graph and ran eagerly",
        "Requests have shapes that the warm-up did not cover: use PAD, BATCH_BUCKETS, or examples.",
    ),
    Family(
        "pytorch_py_stream_responses_total",
        MetricKind.COUNTER,
        _MODEL,
        "responses",
        _DECOUPLED,
        "Responses of streams, without errors",
        "Its rate is the number of tokens per second of a token generator.",
    ),
    Family(
        "pytorch_py_live_streams",
        MetricKind.GAUGE,
        _INSTANCE,
        "streams",
        _DECOUPLED,
        "Streams of responses that have begun and not ended",
        "At MAX_STREAMS, requests wait. High without responses: clients do not read.",
    ),
    Family(
        "pytorch_py_steps_total",
        MetricKind.COUNTER,
        _MODEL,
        "calls",
        _STEPPED,
        "Calls of step()",
        "The denominator of stepped_streams_total.",
    ),
    Family(
        "pytorch_py_stepped_streams_total",
        MetricKind.COUNTER,
        _MODEL,
        "streams",
        _STEPPED,
        "Streams in calls of step()",
        "Divided by steps_total: the mean number of streams that share a step; more is better.",
    ),
    Family(
        "pytorch_py_sequences",
        MetricKind.GAUGE,
        _INSTANCE,
        "sequences",
        _STATES,
        "Sequences that have begun and not ended",
        "It grows without limit: clients do not send END, and the idle time is long.",
    ),
    Family(
        "pytorch_py_sequence_bytes",
        MetricKind.GAUGE,
        _INSTANCE,
        "bytes",
        _STATES,
        "Bytes of the states of sequences that have begun and not ended",
        "Near SEQUENCE_MEMORY_MB, steps are refused with UNAVAILABLE.",
    ),
    Family(
        "pytorch_py_weights_digest",
        MetricKind.GAUGE,
        _INSTANCE,
        "1",
        "`WATCH_WEIGHTS`",
        "The current weights: the first 12 hexadecimal digits of their SHA-256, as a number",
        "New weights are in use. Two values for long: an instance refused them, see its log.",
    ),
    Family(
        "pytorch_py_device_memory_allocated_bytes",
        MetricKind.GAUGE,
        (*_INSTANCE, "device"),
        "bytes",
        _CUDA,
        "Device memory in tensors of an instance",
        "It grows without limit: the model keeps tensors.",
    ),
    Family(
        "pytorch_py_device_memory_reserved_bytes",
        MetricKind.GAUGE,
        (*_INSTANCE, "device"),
        "bytes",
        _CUDA,
        "Device memory that PyTorch's allocator of an instance holds",
        "Far above the allocated memory: fragmentation, see ENABLE_CACHE_CLEANING.",
    ),
    Family(
        "pytorch_py_poisoned",
        MetricKind.GAUGE,
        _INSTANCE,
        "1",
        _ALL,
        "1 for an instance that had a fatal error and no longer answers requests",
        "`torch-py-backend serve` replaces it; elsewhere, unload and load the model.",
    ),
    Family(
        "pytorch_py_ready_timestamp_seconds",
        MetricKind.GAUGE,
        _INSTANCE,
        "seconds since 1970",
        _ALL,
        "When an instance became ready; 0 after a graceful shutdown",
        "It changes repeatedly: the instance crashes and is reloaded, see the server's log.",
    ),
    Family(
        "pytorch_py_heartbeat_timestamp_seconds",
        MetricKind.GAUGE,
        _INSTANCE,
        "seconds since 1970",
        _ALL,
        "When an instance was last alive, updated every second; 0 after a graceful shutdown",
        "It does not change: the process has ended, or its Python hangs, whatever Triton reports. A"
        " model can hang while the heartbeat continues: see running_call_seconds. It stops"
        " during calls of AOTInductor packages.",
    ),
    Family(
        "pytorch_py_running_call_seconds",
        MetricKind.GAUGE,
        _INSTANCE,
        "seconds",
        _ALL,
        "Seconds since the current call of the model's code began; 0 between calls",
        "Far above the usual time of a call: the model hangs. `torch-py-backend serve` replaces it"
        " after EXECUTION_TIMEOUT_MS; elsewhere, unload and load the model.",
    ),
)

BY_SERIES = {series: row for row in TABLE for series in row.series}


def buckets(most: int) -> tuple[int, ...]:
    """Return the bounds of the buckets of batch_rows: powers of two up to the largest batch."""
    bounds = [1]
    while bounds[-1] < most:
        bounds.append(2 * bounds[-1])
    return tuple(bounds)
