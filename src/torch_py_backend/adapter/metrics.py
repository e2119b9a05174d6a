"""The metrics of an instance at Triton's, made of the table `families`.

To tell Triton something costs 12 microseconds, in which Python does nothing else: what is counted
is told once a second, by a thread of its own, and only where it has changed.

Triton keeps what it was told until the server ends. Of counters that is right: they are a model's,
and go on when it is loaded anew. Gauges are an instance's, and 0 once it has ended.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import triton_python_backend_utils as pb_utils

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import PlatformError
from torch_py_backend.observability import metric_families
from torch_py_backend.observability.metric_families import Kind
from torch_py_backend.processes.instance_status import Vitals

if TYPE_CHECKING:  # they need torch, which Triton's look at a config shall not cost
    from torch_py_backend.engine.engine import Engine
    from torch_py_backend.sequences.state_store import Sequences
    from torch_py_backend.streaming.streams import Streams

log = logging.getLogger(__name__)

_SECONDS = 1.0
# What Triton's core says where it was built without metrics.
_WITHOUT_METRICS = "metrics not supported"

# A series: its name, and the labels that it has beside those of the instance.
_Series: TypeAlias = "tuple[str, tuple[tuple[str, str], ...]]"
_Values: TypeAlias = "Iterator[tuple[_Series, float]]"


class Metric:
    """One series at Triton's, which knows what it was told.

    Args:
        config: the instance's config.
        name: the series' name.
        more: the values of those labels that do not follow from the config.

    Attributes:
        supported: whether this server has metrics; asked once.
        grows: it is a counter's.

    Raises:
        PlatformError: Triton refuses it.
    """

    supported: ClassVar[bool] = True

    def __init__(
        self, config: ModelConfig, name: str, more: tuple[tuple[str, str], ...] = ()
    ) -> None:
        row = metric_families.BY_NAME.get(name) or metric_families.BY_NAME[name.rpartition("_")[0]]
        known = {
            "model": config.name,
            "version": config.version,
            "model_instance": config.instance,
            **dict(more),
        }
        labels = {label: known[label] for label in row.labels if label in known}
        self.grows = row.kind is not Kind.GAUGE
        # A gauge may have another value, of an instance of this name whose process died.
        self._told = 0.0 if self.grows else math.nan
        self._metric: Any = None
        if not Metric.supported:
            return
        family = pb_utils.MetricFamily
        try:
            made = family(
                name=name,
                description=row.doc,
                kind=family.COUNTER if self.grows else family.GAUGE,
            )
            self._metric = made.Metric(labels=labels)
        except pb_utils.TritonModelException as error:
            if _WITHOUT_METRICS not in str(error):
                raise _refused(config, name, error) from error
            Metric.supported = False
            return
        # Never freed, not even when the process ends: some servers then free what other instances
        # of the model still use, and die of it (triton-inference-server/server#8663).
        for held in (made, self._metric):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))

    def tell(self, value: float) -> None:
        """Tell Triton the value; of a counter only if it has grown.

        A gauge is told again though it is the same: an instance of the same name that ended since,
        as in a reload without a pause, has set it to 0.
        """
        if self._metric is None:
            return
        if self.grows:
            if value > self._told:
                self._metric.increment(value - self._told)
        elif value or self._told:
            self._metric.set(value)
        self._told = value


def _refused(config: ModelConfig, name: str, error: Exception) -> PlatformError:
    said = str(error).rpartition("message: ")[2]
    return PlatformError(
        config.name,
        f"Triton refuses the metric {name} ({said})",
        expected="a server where nothing else has a metric of that name and another kind",
        cure="Rename the metric of the model or backend that has it, and start the server anew:"
        " Triton forgets no name.",
    )


class Publisher:
    """Tells what an instance counts and how it is, until it is closed.

    Args:
        engine: the model, warmed up: what the warm-up has counted is not the clients' doing.
        vitals: what the instance tells of itself.
        digest: of the weights in force, empty until it is known; None: nobody watches them.

    Raises:
        PlatformError: Triton refuses a metric.
    """

    def __init__(
        self, engine: Engine, vitals: Vitals, digest: Callable[[], str] | None = None
    ) -> None:
        self._engine = engine
        self._config = engine.config
        self._vitals = vitals
        self._digest = digest
        self._streams: Streams | None = None
        self._sequences: Sequences | None = None
        self._bounds = metric_families.buckets(engine.config.max_batch_size)
        self._warmed_up = dict(self._counted())
        self._told: dict[_Series, Metric] = {}
        self._since = time.time()
        self._beyond_help = False
        self._turn = threading.Lock()
        self._left = threading.Event()
        self.tell()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def follow(self, *, streams: Streams | None = None, sequences: Sequences | None = None) -> None:
        """Tell from now on of an instance's streams, or of its sequences.

        Raises:
            PlatformError: Triton refuses a metric.
        """
        with self._turn:
            self._streams, self._sequences = streams, sequences
        self.tell()

    def tell(self) -> None:
        """Tell all that is known by now. May be called in any thread."""
        with self._turn:
            # Gauges that are not among them any more are 0: all of them, once the instance ends.
            gauges = {} if self._left.is_set() else dict(self._gauges())
            for series, value in itertools.chain(self._counters(), gauges.items()):
                metric = self._told.get(series)
                if metric is None:
                    metric = self._told[series] = Metric(self._config, *series)
                metric.tell(value)
                time.sleep(0)  # a request that waits for Python goes first
            for series, metric in self._told.items():
                if not metric.grows and series not in gauges:
                    metric.tell(0)

    def poisoned(self) -> None:
        """Tell that the instance is beyond help."""
        self._beyond_help = True
        self._could_tell()

    def close(self) -> None:
        """Tell the last counts, and that the instance has ended; twice is no error."""
        if self._left.is_set():
            return
        self._left.set()
        self._thread.join()
        self._could_tell()

    def _run(self) -> None:
        while not self._left.wait(_SECONDS) and self._could_tell():
            pass

    def _could_tell(self) -> bool:
        """Tell, if Triton takes it: a refusal harms no request, and keeps nobody from leaving."""
        try:
            self.tell()
        except Exception:  # Triton's side of it
            log.exception("model '%s': metrics cannot be told any more.", self._config.name)
            return False
        return True

    # --- counters --------------------------------------------------------------------------------

    def _counters(self) -> _Values:
        for series, value in self._counted():
            yield series, value - self._warmed_up.get(series, 0)
        yield from self._compiled()
        if self._streams is not None:
            yield from self._streamed(self._streams)

    def _counted(self) -> _Values:
        """All series of what requests have caused, with their totals."""
        counts = self._engine.counts
        for code in dict.fromkeys((*metric_families.CODES, *list(counts.requests))):
            yield ("pytorch_py_requests_total", (("code", code),)), counts.requests.get(code, 0)
        yield from self._batch_rows(dict(counts.batches))
        around = metric_families.AROUND if self._engine.hooks is not None else ()
        for stage in (*metric_families.STAGES, *around):
            seconds: float = getattr(counts, f"{stage}_seconds")
            yield ("pytorch_py_stage_seconds_total", (("stage", stage),)), seconds
        for name in self._totals():
            yield (f"pytorch_py_{name}_total", ()), getattr(counts, name)

    def _totals(self) -> Iterator[str]:
        """Those of the counts that a model of this kind has."""
        yield from ("retried_rows", "memory_splits")
        if self._engine.fills:
            yield from ("rows", "filled_rows", "values", "padded_values")
        if self._engine.callee.compiles or self._engine.callee.captures:
            yield "eager_calls"

    def _batch_rows(self, batches: dict[int, int]) -> _Values:
        """From the last bucket down: who reads in between sees none above the next one."""
        name = "pytorch_py_batch_rows"
        count = sum(batches.values())
        yield (f"{name}_count", ()), count
        yield (f"{name}_sum", ()), sum(rows * seen for rows, seen in batches.items())
        yield (f"{name}_bucket", (("le", "+Inf"),)), count
        for bound in reversed(self._bounds):
            below = sum(seen for rows, seen in batches.items() if rows <= bound)
            yield (f"{name}_bucket", (("le", str(bound)),)), below

    def _compiled(self) -> _Values:
        """Graphs of the warm-up."""
        counts = self._engine.counts
        if self._engine.callee.compiles:
            yield ("pytorch_py_compiled_graphs_total", ()), counts.compiled_graphs
            for result in ("hit", "miss"):
                found = counts.compile_cache.get(result, 0)
                yield ("pytorch_py_compile_cache_total", (("result", result),)), found

    def _streamed(self, streams: Streams) -> _Values:
        yield ("pytorch_py_stream_responses_total", ()), streams.counts.responses
        if streams.steps is not None:
            yield ("pytorch_py_steps_total", ()), streams.steps.calls
            yield ("pytorch_py_stepped_streams_total", ()), streams.steps.streams

    # --- gauges ----------------------------------------------------------------------------------

    def _gauges(self) -> _Values:
        yield ("pytorch_py_poisoned", ()), self._beyond_help
        yield ("pytorch_py_ready_timestamp_seconds", ()), self._since
        yield ("pytorch_py_heartbeat_timestamp_seconds", ()), time.time()
        yield ("pytorch_py_running_call_seconds", ()), self._vitals.under_way()
        if self._streams is not None:
            yield ("pytorch_py_live_streams", ()), self._streams.live
        if self._sequences is not None:
            yield ("pytorch_py_sequences", ()), len(self._sequences)
            yield ("pytorch_py_sequence_bytes", ()), self._sequences.size
        digest = self._digest() if self._digest is not None else ""
        if digest:
            # A value, which a float holds exactly: Triton forgets no label of earlier weights.
            yield ("pytorch_py_weights_digest", ()), int(digest, base=16)
        for device, allocated, reserved in self._engine.memory():
            label = (("device", str(device)),)
            yield ("pytorch_py_device_memory_allocated_bytes", label), allocated
            yield ("pytorch_py_device_memory_reserved_bytes", label), reserved
