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
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import triton_python_backend_utils as pb_utils

from torch_py_backend import families
from torch_py_backend.config import ModelConfig
from torch_py_backend.errors import PlatformError
from torch_py_backend.families import Kind

if TYPE_CHECKING:  # they need torch, which Triton's look at a config shall not cost
    from torch_py_backend.engine import Engine
    from torch_py_backend.streams import Streams

log = logging.getLogger(__name__)

_SECONDS = 1.0
# What Triton's core says where it was built without metrics.
_WITHOUT_METRICS = "metrics not supported"

# A series: its name, and the labels that it has beside those of the instance.
_Series: TypeAlias = "tuple[str, tuple[tuple[str, str], ...]]"


class Metric:
    """One series at Triton's, which knows what it was told.

    Args:
        config: the instance's config.
        name: the series' name.
        more: the values of those labels that do not follow from the config.

    Attributes:
        supported: whether this server has metrics; asked once.

    Raises:
        PlatformError: Triton refuses it.
    """

    supported: ClassVar[bool] = True

    def __init__(
        self, config: ModelConfig, name: str, more: tuple[tuple[str, str], ...] = ()
    ) -> None:
        row = families.BY_NAME.get(name) or families.BY_NAME[name.rpartition("_")[0]]
        known = {
            "model": config.name,
            "version": config.version,
            "model_instance": config.instance,
            **dict(more),
        }
        labels = {label: known[label] for label in row.labels if label in known}
        self._grows = row.kind is not Kind.GAUGE
        self._told = 0.0
        self._metric: Any = None
        if not Metric.supported:
            return
        family = pb_utils.MetricFamily
        try:
            made = family(
                name=name,
                description=row.doc,
                kind=family.COUNTER if self._grows else family.GAUGE,
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
        if not self._grows:
            self._metric.set(value)
        elif value > self._told:
            self._metric.increment(value - self._told)
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


class _Weights:
    """A gauge of 1, whose label `weights` tells which weights an instance's model has."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._told: dict[str, Metric] = {}

    def tell(self, digest: str) -> None:
        """Tell which they are; empty: none any more. Those that were are 0."""
        if digest and digest not in self._told:
            self._told[digest] = Metric(
                self._config, "pytorch_py_weights_info", (("weights", digest),)
            )
        for one, metric in self._told.items():
            metric.tell(one == digest)


class Publisher:
    """Tells what an instance has counted, until it is closed.

    Args:
        engine: the model, warmed up: what the warm-up has counted is not the clients' doing.
        digest: of the weights in force, empty until it is known; None: nobody watches them.

    Raises:
        PlatformError: Triton refuses a metric.
    """

    def __init__(self, engine: Engine, digest: Callable[[], str] | None = None) -> None:
        self._engine = engine
        self._digest = digest
        self._weights = _Weights(engine.config)
        self._config = engine.config
        self._bounds = families.buckets(engine.config.max_batch_size)
        self._warmed_up = dict(self._counted())
        self._told = {series: self._made(series) for series in self._warmed_up}
        # Compiled graphs are those of the warm-up.
        for series, value in self._compiled():
            self._told[series] = self._made(series)
            self._told[series].tell(value)
        self._poisoned = self._made(("pytorch_py_poisoned", ()))
        self._ready = self._made(("pytorch_py_ready_timestamp_seconds", ()))
        self._alive = self._made(("pytorch_py_heartbeat_timestamp_seconds", ()))
        self._since = time.time()
        self._beyond_help = False
        self._turn = threading.Lock()
        self._left = threading.Event()
        self.tell()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """Tell all that was counted by now. May be called in any thread."""
        with self._turn:
            for series, value in itertools.chain(self._counted(), self._held()):
                metric = self._told.get(series)
                if metric is None:  # a code that is rare, or a device that is used since
                    metric = self._told[series] = self._made(series)
                metric.tell(value - self._warmed_up.get(series, 0))
                time.sleep(0)  # a request that waits for Python goes first
            if self._digest is not None:
                self._weights.tell(self._digest())
            self._poisoned.tell(self._beyond_help)
            self._ready.tell(self._since)
            self._alive.tell(time.time())

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
        if not self._could_tell():
            return
        held = (self._told[series] for series, _ in self._held())
        for gauge in (self._alive, self._ready, self._poisoned, *held):
            gauge.tell(0)
        self._weights.tell("")

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

    def _made(self, series: _Series) -> Metric:
        return Metric(self._config, *series)

    # --- what was counted ------------------------------------------------------------------------

    def _counted(self) -> Iterator[tuple[_Series, float]]:
        """All series of what requests have caused, with their totals."""
        counts = self._engine.counts
        for code in dict.fromkeys((*families.CODES, *list(counts.requests))):
            yield ("pytorch_py_requests_total", (("code", code),)), counts.requests.get(code, 0)
        yield from self._batch_rows(dict(counts.batches))
        around = families.AROUND if self._engine.hooks is not None else ()
        for stage in (*families.STAGES, *around):
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

    def _batch_rows(self, batches: dict[int, int]) -> Iterator[tuple[_Series, float]]:
        name = "pytorch_py_batch_rows"
        count = sum(batches.values())
        for bound in self._bounds:
            below = sum(seen for rows, seen in batches.items() if rows <= bound)
            yield (f"{name}_bucket", (("le", str(bound)),)), below
        yield (f"{name}_bucket", (("le", "+Inf"),)), count
        yield (f"{name}_sum", ()), sum(rows * seen for rows, seen in batches.items())
        yield (f"{name}_count", ()), count

    def _compiled(self) -> Iterator[tuple[_Series, float]]:
        counts = self._engine.counts
        if self._engine.callee.compiles:
            yield ("pytorch_py_compiled_graphs_total", ()), counts.compiled_graphs
            for result in ("hit", "miss"):
                found = counts.compile_cache.get(result, 0)
                yield ("pytorch_py_compile_cache_total", (("result", result),)), found

    def _held(self) -> Iterator[tuple[_Series, float]]:
        """Memory of GPUs."""
        for device, allocated, reserved in self._engine.memory():
            label = (("device", str(device)),)
            yield ("pytorch_py_device_memory_allocated_bytes", label), allocated
            yield ("pytorch_py_device_memory_reserved_bytes", label), reserved


class LiveStreams:
    """The streams of one instance: how many are live, and how well they share their steps."""

    def __init__(self, config: ModelConfig, streams: Streams) -> None:
        self._streams = streams
        self._live = Metric(config, "pytorch_py_live_streams")
        self._responses = Metric(config, "pytorch_py_stream_responses_total")
        self._live.tell(0)
        self._steps = streams.steps
        if streams.steps is not None:
            self._calls = Metric(config, "pytorch_py_steps_total")
            self._stepped = Metric(config, "pytorch_py_stepped_streams_total")

    def tell(self) -> None:
        """Tell what has changed."""
        self._live.tell(self._streams.live)
        self._responses.tell(self._streams.counts.responses)
        if self._steps is not None:
            self._calls.tell(self._steps.calls)
            self._stepped.tell(self._steps.streams)

    def end(self) -> None:
        """Tell the last counts; twice is no error."""
        self.tell()
        self._live.tell(0)


class Sequences:
    """Gauges of one instance: its live sequences, and the memory that their states take."""

    def __init__(self, config: ModelConfig) -> None:
        self._live = Metric(config, "pytorch_py_sequences")
        self._size = Metric(config, "pytorch_py_sequence_bytes")

    def tell(self, sequences: int, size: int) -> None:
        """Tell both."""
        self._live.tell(sequences)
        self._size.tell(size)

    def end(self) -> None:
        """There are none any more; twice is no error."""
        self.tell(0, 0)
