"""What Triton's /metrics tells of a model: one table of metric families.

The adapter makes them of it, docs/metrics.md shows it, and whatever a dashboard or an alert of ours
names must be in it. A name keeps its kind for ever: Triton knows it until the server ends, also
where a newer version of this package is installed meanwhile, and may die when it refuses one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    # Counters, named and labelled as a histogram's series are: docs/metrics.md says why.
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table.

    Attributes:
        name: as Prometheus has it; of a histogram without `_bucket`, `_sum` and `_count`.
        kind: what it is.
        labels: what its metrics differ in.
        unit: of its values.
        told: of which models.
        doc: what it tells; Triton's HELP.
        moves: what to look at when it moves.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    told: str
    doc: str
    moves: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names that are scraped."""
        if self.kind is not Kind.HISTOGRAM:
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


# An instance adds to what its model's others count. A label `instance` would be Prometheus' own.
_MODEL = ("model", "version")
_INSTANCE = (*_MODEL, "model_instance")
_ALL = "all models"
_FILLING = "`BATCH_BUCKETS`, `PAD`, or a program with fixed rows"
_COMPILED = "models that are compiled"
_DECOUPLED = "decoupled models"
_STEPPED = "decoupled models with `step()`"
_CUDA = "instances on CUDA devices"
_STATES = "models with states"

# What is told of a request that was answered.
OK = "OK"
# Told from the beginning, so that the first one is seen as a rise.
CODES = (OK, "INVALID_ARG", "INTERNAL", "UNAVAILABLE", "CANCELLED")
STAGES = ("gather", "host_to_device", "forward", "device_to_host")
# Of models with hooks: before and after these.
AROUND = ("preprocess", "postprocess")

TABLE = (
    Family(
        "pytorch_py_requests_total",
        Kind.COUNTER,
        (*_MODEL, "code"),
        "requests",
        _ALL,
        "Requests that were answered, by the code of the answer; OK for those without an error",
        "INTERNAL: the model raises, see the server's log. UNAVAILABLE: memory, or a poisoned"
        " instance. INVALID_ARG: a client. CANCELLED: clients lose patience, look at the queue.",
    ),
    Family(
        "pytorch_py_batch_rows",
        Kind.HISTOGRAM,
        (*_MODEL, "le"),
        "rows",
        _ALL,
        "Rows of each batch that went well, those not counted that only fill a bucket",
        "All in the first bucket under load: requests are not batched, look at dynamic_batching."
        " All in the last: a larger max_batch_size may pay.",
    ),
    Family(
        "pytorch_py_stage_seconds_total",
        Kind.COUNTER,
        (*_MODEL, "stage"),
        "seconds",
        _ALL,
        "Seconds that batches that went well spent in a stage",
        "The stage that grew is the one to look at: forward is the model, gather grows with many"
        " small requests, the host_to_device and device_to_host of a GPU with large tensors.",
    ),
    Family(
        "pytorch_py_rows_total",
        Kind.COUNTER,
        _MODEL,
        "rows",
        _FILLING,
        "Rows that the model was called with, those that fill a bucket included",
        "It is what the next one is a share of.",
    ),
    Family(
        "pytorch_py_filled_rows_total",
        Kind.COUNTER,
        _MODEL,
        "rows",
        _FILLING,
        "Rows that only fill a bucket",
        "Above a quarter of the rows: choose other buckets, see batch_rows.",
    ),
    Family(
        "pytorch_py_values_total",
        Kind.COUNTER,
        _MODEL,
        "values",
        _FILLING,
        "Values of padded inputs that the model was called with",
        "It is what the next one is a share of.",
    ),
    Family(
        "pytorch_py_padded_values_total",
        Kind.COUNTER,
        _MODEL,
        "values",
        _FILLING,
        "Values that are only padding",
        "Above half of the values: lengths differ too much within a batch; a smaller batch or"
        " another model for the long ones may be faster.",
    ),
    Family(
        "pytorch_py_retried_rows_total",
        Kind.COUNTER,
        _MODEL,
        "rows",
        _ALL,
        "Rows, or streams, that were run again because a batch with them had failed",
        "Bad requests share batches with good ones, or memory runs out: see requests_total.",
    ),
    Family(
        "pytorch_py_memory_splits_total",
        Kind.COUNTER,
        _MODEL,
        "times",
        _ALL,
        "Times that memory ran out, and calls became smaller",
        "Less max_batch_size, fewer instances, or CUDA_MEMORY_FRACTION.",
    ),
    Family(
        "pytorch_py_compiled_graphs_total",
        Kind.COUNTER,
        _MODEL,
        "graphs",
        _COMPILED,
        "Graphs that torch.compile made or found in its cache before READY",
        "It moves when an instance starts, and never while it serves.",
    ),
    Family(
        "pytorch_py_compile_cache_total",
        Kind.COUNTER,
        (*_MODEL, "result"),
        "starts",
        _COMPILED,
        "Starts that found what an earlier one had compiled (hit), or had to compile (miss)",
        "A miss at every start: nothing is kept, see COMPILE_CACHE_DIR and the server's log.",
    ),
    Family(
        "pytorch_py_eager_calls_total",
        Kind.COUNTER,
        _MODEL,
        "calls",
        "models that are compiled, or captured in CUDA graphs",
        "Calls after READY that would have needed a new graph, and ran without one",
        "Shapes that the warm-up did not meet: PAD, BATCH_BUCKETS, or example inputs.",
    ),
    Family(
        "pytorch_py_stream_responses_total",
        Kind.COUNTER,
        _MODEL,
        "responses",
        _DECOUPLED,
        "Responses of streams, errors not included",
        "Its rate is the speed of token generators.",
    ),
    Family(
        "pytorch_py_live_streams",
        Kind.GAUGE,
        _INSTANCE,
        "streams",
        _DECOUPLED,
        "Streams of responses that have begun and not ended",
        "At MAX_STREAMS requests wait; for ever high without responses: clients that do not read.",
    ),
    Family(
        "pytorch_py_steps_total",
        Kind.COUNTER,
        _MODEL,
        "calls",
        _STEPPED,
        "Calls of step()",
        "It is what the next one is divided by.",
    ),
    Family(
        "pytorch_py_stepped_streams_total",
        Kind.COUNTER,
        _MODEL,
        "streams",
        _STEPPED,
        "Streams that step() was called with",
        "Divided by the calls it is how many streams share a step: the higher the better.",
    ),
    Family(
        "pytorch_py_sequences",
        Kind.GAUGE,
        _INSTANCE,
        "sequences",
        _STATES,
        "Sequences that have begun and not ended",
        "It grows for ever: clients do not send END, and the idle time is long.",
    ),
    Family(
        "pytorch_py_sequence_bytes",
        Kind.GAUGE,
        _INSTANCE,
        "bytes",
        _STATES,
        "Bytes that the states of these sequences take",
        "Near SEQUENCE_MEMORY_MB steps are refused with UNAVAILABLE.",
    ),
    Family(
        "pytorch_py_weights_digest",
        Kind.GAUGE,
        _INSTANCE,
        "1",
        "`WATCH_WEIGHTS`",
        "The weights in force: the first 12 hexadecimal digits of their SHA-256, as a number",
        "New weights are in force. Two values for long: an instance has refused them, see its log.",
    ),
    Family(
        "pytorch_py_device_memory_allocated_bytes",
        Kind.GAUGE,
        (*_INSTANCE, "device"),
        "bytes",
        _CUDA,
        "Memory of the device that tensors of an instance take",
        "It grows without an end: the model keeps tensors.",
    ),
    Family(
        "pytorch_py_device_memory_reserved_bytes",
        Kind.GAUGE,
        (*_INSTANCE, "device"),
        "bytes",
        _CUDA,
        "Memory of the device that PyTorch's allocator of an instance holds",
        "Far above what is allocated: fragments, see ENABLE_CACHE_CLEANING.",
    ),
    Family(
        "pytorch_py_poisoned",
        Kind.GAUGE,
        _INSTANCE,
        "1",
        _ALL,
        "1 for an instance that met a fatal error and answers no requests any more",
        "`torch-py-backend serve` replaces it; elsewhere unload and load the model.",
    ),
    Family(
        "pytorch_py_ready_timestamp_seconds",
        Kind.GAUGE,
        _INSTANCE,
        "seconds since 1970",
        _ALL,
        "When an instance became ready; 0 once it has ended in order",
        "It changes again and again: the model dies and is loaded anew, see the server's log.",
    ),
    Family(
        "pytorch_py_heartbeat_timestamp_seconds",
        Kind.GAUGE,
        _INSTANCE,
        "seconds since 1970",
        _ALL,
        "When an instance was last alive, told once a second; 0 once it has ended in order",
        "It stands still: the process is gone, or its Python is stuck, whatever Triton says of the"
        " model. A model that hangs need not stop it: see running_call_seconds.",
    ),
    Family(
        "pytorch_py_running_call_seconds",
        Kind.GAUGE,
        _INSTANCE,
        "seconds",
        _ALL,
        "How long the call of the model's code has taken that is under way; 0 between calls",
        "It grows far beyond what a call takes: the model hangs. EXECUTION_TIMEOUT_MS has"
        " `torch-py-backend serve` replace it; elsewhere unload and load the model.",
    ),
)

BY_NAME = {one.name: one for one in TABLE}


def buckets(most: int) -> tuple[int, ...]:
    """Upper bounds of the buckets of batch_rows: powers of two, as far as batches can have rows."""
    bounds = [1]
    while bounds[-1] < most:
        bounds.append(2 * bounds[-1])
    return tuple(bounds)
