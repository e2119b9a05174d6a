"""The metrics of an instance in Triton's /metrics: a table, and where their values are.

The adapter publishes the rows, docs/metrics.md shows them, and the dashboard and the alerts use
only these. A name must never change between a counter (`_total`) and a gauge: Triton remembers a
family until the server exits, even if a newer version of this package is installed meanwhile, and
may crash when it refuses a family with another kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.streams import Streams
from torch_py_backend.pipeline.run import CODES
from torch_py_backend.pipeline.sequences import Sequences
from torch_py_backend.processes.instance_status import InstanceStatus

STAGES = ("gather", "host_to_device", "forward", "device_to_host")
# The stages of models with hooks before and after STAGES.
HOOK_STAGES = ("preprocess", "postprocess")
# The values of a family by its own label, "" where it has none.
Values: TypeAlias = "Mapping[str, float]"


class Family(NamedTuple):
    """A row of the table.

    Attributes:
        name: the Prometheus name.
        doc: a description; Triton's HELP.
        label: the label that it has beside those of the model or the instance; empty: none.
    """

    name: str
    doc: str
    label: str = ""

    @property
    def grows(self) -> bool:
        """Whether it is a counter of the model, not a gauge of the instance."""
        return self.name.endswith("_total")

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        # Without `model_instance`, all instances of a model add to one series. The label `instance`
        # is reserved by Prometheus.
        names = ["model", "version"]
        if not self.grows:
            names.append("model_instance")
        if self.label:
            names.append(self.label)
        return tuple(names)


TABLE = (
    Family(
        "pytorch_py_requests_total",
        "Requests that were answered, by the code of the response; OK for those without an error",
        "code",
    ),
    Family(
        "pytorch_py_stage_seconds_total",
        "Seconds that successful batches spent in a stage",
        "stage",
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
        "result",
    ),
    Family(
        "pytorch_py_eager_calls_total", "Calls after READY that needed a new graph and ran eagerly"
    ),
    Family("pytorch_py_stream_responses_total", "Responses of streams, without errors"),
    Family("pytorch_py_live_streams", "Streams of responses that have begun and not ended"),
    Family("pytorch_py_stepped_streams_total", "Streams in calls of step()"),
    Family("pytorch_py_sequences", "Sequences whose states are kept"),
    Family(
        "pytorch_py_device_memory_allocated_bytes",
        "Device memory in tensors of an instance",
        "device",
    ),
    Family(
        "pytorch_py_poisoned",
        "1 for an instance that had a fatal error and no longer answers requests",
    ),
    Family(
        "pytorch_py_running_call_seconds",
        "Seconds since the current call of the model's code began; 0 between calls",
    ),
)
BY_NAME = {row.name: row for row in TABLE}
# Families of which the warm-up counts, too.
OF_LOAD = ("pytorch_py_compiled_graphs_total", "pytorch_py_compile_cache_total")


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

    def read(self) -> dict[str, Values]:
        """Return the present values of the families that the model has."""
        engine, counts = self.engine, self.engine.counts
        stages = STAGES if engine.hooks is None else (*STAGES, *HOOK_STAGES)
        values: dict[str, Values] = {
            # They exist from the beginning, so that Prometheus sees the first count as an increase.
            "requests_total": dict.fromkeys(CODES, 0) | counts.requests,
            "stage_seconds_total": {name: getattr(counts, f"{name}_seconds") for name in stages},
            "device_memory_allocated_bytes": {
                str(device): allocated for device, allocated in runtime.memory()
            },
        }
        single: dict[str, float] = {
            "retried_rows_total": counts.retried_rows,
            "poisoned": engine.failures.fatal is not None,
            "running_call_seconds": self.status.running_seconds(),
        }
        if engine.padding is not None or engine.rows.buckets or engine.rows.least > 1:
            single["rows_total"] = counts.rows
            single["filled_rows_total"] = counts.filled_rows
        if engine.compiles:
            single["compiled_graphs_total"] = counts.compiled_graphs
            single["eager_calls_total"] = counts.eager_calls
            values["compile_cache_total"] = {"hit": 0, "miss": 0} | counts.compile_cache
        if self.streams is not None:
            single["stream_responses_total"] = counts.responses
            single["live_streams"] = self.streams.live
            if self.streams.stepped is not None:
                single["stepped_streams_total"] = self.streams.stepped
        if self.sequences is not None:
            single["sequences"] = len(self.sequences)
        values |= {name: {"": value} for name, value in single.items()}
        return {f"pytorch_py_{name}": value for name, value in values.items()}
