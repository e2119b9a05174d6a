"""What Triton's metrics tell of an instance: counts, now and then, and the weights in force."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from torch_py_backend.config import ModelConfig
from torch_py_backend.counts import DOCS, Counts

if TYPE_CHECKING:  # it needs torch, which Triton's look at a config shall not cost
    from torch_py_backend.streams import Streams

_SECONDS = 1.0


class Publisher:
    """Counters of one instance; an instance adds to those of its model's others."""

    def __init__(self, config: ModelConfig, counts: Counts) -> None:
        labels = {"model": config.name, "version": config.version}
        self._totals = {
            # The warm-up is not the clients' doing.
            name: _Total(f"pytorch_py_{name}_total", doc, labels, getattr(counts, name))
            for name, doc in DOCS.items()
        }
        self._counts = counts
        self._due = time.monotonic()

    def tell(self) -> None:
        """Send what was counted since the last time, at most once a second."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _SECONDS
            self.tell_all()

    def tell_all(self) -> None:
        """Send what was counted since the last time."""
        for name, total in self._totals.items():
            total.tell(getattr(self._counts, name))


class LiveStreams:
    """The streams of one instance: how many are live, and how well they share their steps."""

    def __init__(self, config: ModelConfig, streams: Streams) -> None:
        self._streams = streams
        labels = {"model": config.name, "version": config.version}
        kind = pb_utils.MetricFamily
        self._live_family = kind(
            name="pytorch_py_live_streams",
            description="Streams of responses that have begun and not ended",
            kind=kind.GAUGE,
        )
        self._live = self._live_family.Metric(labels={**labels, "instance": config.instance})
        # An instance that exited has left its own behind.
        self._live.set(0)
        self._steps = streams.steps
        if streams.steps is not None:
            self._calls = _Total("pytorch_py_steps_total", "Calls of step()", labels)
            self._stepped = _Total(
                "pytorch_py_stepped_streams_total", "Streams that step() was called with", labels
            )

    def tell(self) -> None:
        """Send what has changed."""
        self._live.set(self._streams.live)
        if self._steps is not None:
            self._calls.tell(self._steps.calls)
            self._stepped.tell(self._steps.streams)


class _Total:
    """A counter of one instance's, which knows what it has sent."""

    def __init__(self, name: str, doc: str, labels: Mapping[str, str], sent: int = 0) -> None:
        # A metric lives as long as its family does.
        self._family = pb_utils.MetricFamily(
            name=name, description=doc, kind=pb_utils.MetricFamily.COUNTER
        )
        self._metric = self._family.Metric(labels=dict(labels))
        self._sent = sent

    def tell(self, count: int) -> None:
        if count > self._sent:
            self._metric.increment(count - self._sent)
            self._sent = count


class WeightsInForce:
    """A gauge of 1, whose label `weights` tells which weights an instance's model has."""

    def __init__(self, config: ModelConfig) -> None:
        self._labels = {"model": config.name, "version": config.version}
        self._family = pb_utils.MetricFamily(
            name="pytorch_py_weights_info",
            description="1 for the weights in force, told by the label: digits of their SHA-256",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        self._told = ""
        self._metric: Any = None

    def tell(self, digest: str) -> None:
        """Tell what changed; the old label goes with its metric."""
        if digest != self._told:
            self._told = digest
            self._metric = self._family.Metric(labels={**self._labels, "weights": digest})
            self._metric.set(1)


class Health:
    """A gauge of one instance: whether it is beyond help."""

    def __init__(self, config: ModelConfig) -> None:
        self._family = pb_utils.MetricFamily(
            name="pytorch_py_poisoned",
            description="1 for an instance that met a fatal error and answers no requests any more",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        labels = {"model": config.name, "version": config.version, "instance": config.instance}
        self._metric = self._family.Metric(labels=labels)
        # An instance that exited has left its own behind.
        self._metric.set(0)

    def poisoned(self) -> None:
        self._metric.set(1)


class Sequences:
    """Gauges of one instance: its live sequences, and the memory that their states take."""

    def __init__(self, config: ModelConfig) -> None:
        labels = {"model": config.name, "version": config.version, "instance": config.instance}
        self._families = [
            pb_utils.MetricFamily(
                name=f"pytorch_py_{name}", description=doc, kind=pb_utils.MetricFamily.GAUGE
            )
            for name, doc in (
                ("sequences", "Sequences that have begun and not ended"),
                ("sequence_bytes", "Bytes that the states of these sequences take"),
            )
        ]
        self._metrics = [family.Metric(labels=labels) for family in self._families]
        self._told: tuple[int, ...] | None = None

    def tell(self, sequences: int, size: int) -> None:
        """Tell both, where they have changed."""
        values = (sequences, size)
        if values != self._told:
            self._told = values
            for metric, value in zip(self._metrics, values, strict=True):
                metric.set(value)
