"""Measures ways to run a model beside the way that config.pbtxt has, and says which is fastest.

Each candidate runs in a process of its own, together with the model as configured. The two are
timed in turn (A B B A), because the speed of a machine drifts within minutes. Numbers of threads
and instances are not searched: docs/performance.md says how to choose them.

Imports no torch: the models run in child processes (`measurement.measure`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch_py_backend.config import pbtxt
from torch_py_backend.config.pbtxt import Document
from torch_py_backend.errors import LoadError
from torch_py_backend.loading.discovery import ArtifactType
from torch_py_backend.processes import child_process

COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
TUNED = ("OPTIMIZE", COMPILE, "BATCH_BUCKETS")
"""The options that a candidate replaces."""
_MEASURE = "torch_py_backend.model_folders.measurement:measure"
# A candidate is better from this mean gain on, and if neither gain is a loss.
_LEAST_GAIN, _LOSS = 1.03, 0.98
_FREEZING = '{"options": {"freezing": true}}'

_ANY = tuple(ArtifactType)
_MODULES = (ArtifactType.MODULE, ArtifactType.FACTORY, ArtifactType.EXPORTED)
_WEIGHTS = (ArtifactType.MODULE, ArtifactType.FACTORY, ArtifactType.TORCHSCRIPT)
_SCRIPTS = (ArtifactType.TORCHSCRIPT,)


class Runtime(NamedTuple):
    """A way to run a model: the artifacts that can be run so, and the options for it."""

    title: str
    kinds: tuple[ArtifactType, ...]
    parameters: Mapping[str, str]


AS_CONFIGURED = Runtime("as configured", _ANY, {})
_RUNTIMES = (
    Runtime("eager", _MODULES, {}),
    Runtime("channels_last", _WEIGHTS, {"OPTIMIZE": "channels_last"}),
    Runtime("freeze", _SCRIPTS, {"OPTIMIZE": "freeze"}),
    Runtime("compile", _MODULES, {COMPILE: "{}"}),
    Runtime("compile, freezing", _MODULES, {COMPILE: _FREEZING}),
    Runtime("compile, channels_last", _MODULES, {COMPILE: "{}", "OPTIMIZE": "channels_last"}),
    Runtime("compile, fixed sizes", _MODULES, {COMPILE: '{"dynamic": false}'}),
)
_GRAPHS = '{"mode": "reduce-overhead"}'
_OF_GPUS = (Runtime("compile, CUDA graphs", _MODULES, {COMPILE: _GRAPHS, "BATCH_BUCKETS": "auto"}),)
_REDUCED = (
    Runtime("bf16", _WEIGHTS, {"OPTIMIZE": "bf16"}),
    Runtime("compile, freezing, bf16", _MODULES, {COMPILE: _FREEZING, "OPTIMIZE": "bf16"}),
)


class Row(NamedTuple):
    """A candidate's figures. Gains are ratios to the model as configured, medians of the rounds.

    Attributes:
        kind: the name of the artifact's type.
        latency_ms: milliseconds of a call with one row.
        throughput: rows per second of a full batch.
        spread: the largest relative distance of a round's ratio from its median.
        cores: processor cores in use during a full batch.
        ready_s: seconds of the load and the warm-up.
        error: the largest difference from the outputs as configured, relative to their values.
        failure: why it was not measured; empty: it was.
    """

    runtime: Runtime
    kind: str = ""
    latency_ms: float = 0.0
    latency_gain: float = 1.0
    throughput: float = 0.0
    throughput_gain: float = 1.0
    spread: float = 0.0
    cores: float = 0.0
    ready_s: float = 0.0
    error: float = 0.0
    failure: str = ""

    @property
    def gain(self) -> float:
        """The geometric mean of both gains."""
        return math.sqrt(self.latency_gain * self.throughput_gain)


def measure(
    folder: Path, version: str, document: Document, timeout_s: float, *, reduced: bool
) -> Iterator[Row]:
    """Yield the figures of the model as configured, and then of each candidate that suits it.

    Those of the model as configured show how far two measurements of one model differ. Each
    candidate has `timeout_s` seconds; 16-bit types are tried if `reduced`.

    Raises:
        LoadError: the model as configured cannot be run.
    """
    configured = pbtxt.arguments(folder, version, document)

    def row(runtime: Runtime, arguments: Mapping[str, str]) -> Row:
        rows = max(1, document["max_batch_size"])
        task = {"arguments": arguments, "configured": configured, "rows": rows}
        return Row(runtime, **child_process.run(_MEASURE, task, timeout_s, quiet=True))

    first = row(AS_CONFIGURED, configured)
    yield first
    on_gpu = document["instance_group"][0]["kind"] == "KIND_GPU"
    others = {k: v for k, v in document.get("parameters", {}).items() if k not in TUNED}
    for runtime in (*_RUNTIMES, *(_OF_GPUS if on_gpu else ()), *(_REDUCED if reduced else ())):
        if ArtifactType[first.kind] not in runtime.kinds:
            continue
        candidate = {**document, "parameters": others | pbtxt.parameters(runtime.parameters)}
        try:
            yield row(runtime, pbtxt.arguments(folder, version, candidate))
        except LoadError as error:
            yield Row(runtime, failure=str(error))


def best(rows: Sequence[Row], max_error: float) -> Row | None:
    """Return the exact row with the best mean gain, without a loss; None: none is better."""
    better = [
        row
        for row in rows
        if not row.failure
        and row.error <= max_error
        and min(row.latency_gain, row.throughput_gain) >= _LOSS
        and row.gain >= _LEAST_GAIN
    ]
    return max(better, key=lambda row: row.gain, default=None)
