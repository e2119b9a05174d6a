"""The metrics of an instance in Triton's /metrics: a table whose rows read their values.

The adapter publishes the rows, docs/metrics.md shows them, and the dashboard and the alerts use
only these. A name must never change between a counter (`_total`) and a gauge: Triton remembers a
family until the server exits, even if a newer version of this package is installed meanwhile, and
may crash when it refuses a family with another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.streams import Streams
from torch_py_backend.pipeline.run import CODES
from torch_py_backend.pipeline.sequences import Sequences
from torch_py_backend.processes.instance_status import InstanceStatus

# Without `model_instance`, all instances of a model add to one series. The label `instance` is
# reserved by Prometheus.
_MODEL = ("model", "version")
STAGES = ("gather", "host_to_device", "forward", "device_to_host")
# The stages of models with hooks before and after STAGES.
HOOK_STAGES = ("preprocess", "postprocess")
# The values of a family by its own label, "" where it has none; empty: the instance has no series.
Values: TypeAlias = "Mapping[str, float]"


@dataclass(slots=True)
class Sources:
    """What the metrics of an instance are read from.

    Attributes:
        streams: the streams of a decoupled model.
        sequences: the states of a model with sequences.
    """

    engine: Engine
    status: InstanceStatus
    streams: Streams | None = None
    sequences: Sequences | None = None


Read: TypeAlias = "Callable[[Sources], Values]"


class Family(NamedTuple):
    """A row of the table.

    Attributes:
        name: the Prometheus name.
        doc: a description; Triton's HELP.
        read: returns the present values.
        label: the label that it has beside those of the model or the instance; empty: none.
        of_load: whether the warm-up counts, too.
    """

    name: str
    doc: str
    read: Read
    label: str = ""
    of_load: bool = False

    @property
    def grows(self) -> bool:
        """Whether it is a counter of the model, not a gauge of the instance."""
        return self.name.endswith("_total")

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        instance = () if self.grows else ("model_instance",)
        return (*_MODEL, *instance, *([self.label] if self.label else []))


# --- values --------------------------------------------------------------------------------------


def _requests(of: Sources) -> Values:
    # These exist from the beginning, so that Prometheus sees the first count as an increase.
    return dict.fromkeys(CODES, 0) | of.engine.counts.requests


def _stage_seconds(of: Sources) -> Values:
    around = HOOK_STAGES if of.engine.hooks is not None else ()
    return {stage: getattr(of.engine.counts, f"{stage}_seconds") for stage in (*STAGES, *around)}


def _compile_cache(of: Sources) -> Values:
    return {"hit": 0, "miss": 0} | of.engine.counts.compile_cache if of.engine.compiles else {}


def _stepped_streams(of: Sources) -> Values:
    stepped = of.streams.stepped if of.streams is not None else None
    return {"": stepped} if stepped is not None else {}


def _counted(field: str, applies: Callable[[Sources], bool] = lambda _: True) -> Read:
    """Return the function that reads a field of `Counts`, if it applies to the model."""
    return lambda of: {"": getattr(of.engine.counts, field)} if applies(of) else {}


def _fills_rows(of: Sources) -> bool:
    rows = of.engine.rows
    return of.engine.padding is not None or bool(rows.buckets) or rows.least > 1


def _compiles(of: Sources) -> bool:
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
        of_load=True,
    ),
    Family(
        "pytorch_py_compile_cache_total",
        "Starts that found compiled graphs of an earlier start (hit), or had to compile (miss)",
        _compile_cache,
        "result",
        of_load=True,
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
