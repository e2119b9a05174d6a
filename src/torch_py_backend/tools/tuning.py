"""Measures ways to run a model beside the way that config.pbtxt has, and says which is fastest.

The model as configured and each candidate run in processes of their own, and are timed in turn
(A B B A), because the speed of a machine drifts within minutes. Numbers of threads and instances
are not searched: docs/performance.md says how to choose them.

Imports no torch: the models run in child processes (`trial.measure`).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.config import pbtxt
from torch_py_backend.errors import LoadError
from torch_py_backend.processes.child_process import Workers

COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
TUNED = ("OPTIMIZE", COMPILE, "BATCH_BUCKETS")
"""The options that a candidate replaces."""
_ROUNDS = 5
_SECONDS = 0.2
_MEASURE = "torch_py_backend.tools.trial:measure"
# A candidate is better from this mean gain on, and if neither gain is a loss.
_LEAST_GAIN, _LOSS = 1.03, 0.98

_MODULES = (ArtifactType.MODULE, ArtifactType.FACTORY, ArtifactType.EXPORTED)
_WEIGHTS = (ArtifactType.MODULE, ArtifactType.FACTORY, ArtifactType.TORCHSCRIPT)
_FREEZING = '{"options": {"freezing": true}}'


class Runtime(NamedTuple):
    """A way to run a model.

    Attributes:
        kinds: the artifacts that can be run so.
        reduced: whether it computes in 16 bits.
        kind: the instance that it needs; empty: any.
    """

    title: str
    kinds: tuple[ArtifactType, ...]
    parameters: Mapping[str, str]
    reduced: bool = False
    kind: str = ""


RUNTIMES = (
    Runtime("eager", _MODULES, {}),
    Runtime("channels_last", _WEIGHTS, {"OPTIMIZE": "channels_last"}),
    Runtime("freeze", (ArtifactType.TORCHSCRIPT,), {"OPTIMIZE": "freeze"}),
    Runtime("compile", _MODULES, {COMPILE: "{}"}),
    Runtime("compile, freezing", _MODULES, {COMPILE: _FREEZING}),
    Runtime("compile, channels_last", _MODULES, {COMPILE: "{}", "OPTIMIZE": "channels_last"}),
    Runtime("compile, fixed sizes", _MODULES, {COMPILE: '{"dynamic": false}'}),
    Runtime(
        "compile, CUDA graphs",
        _MODULES,
        {COMPILE: '{"mode": "reduce-overhead"}', "BATCH_BUCKETS": "auto"},
        kind="KIND_GPU",
    ),
    Runtime("bf16", _WEIGHTS, {"OPTIMIZE": "bf16"}, reduced=True),
    Runtime(
        "compile, freezing, bf16",
        _MODULES,
        {COMPILE: _FREEZING, "OPTIMIZE": "bf16"},
        reduced=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate's figures.

    Attributes:
        latency_ms: milliseconds of a call with one row.
        throughput: rows per second of a full batch.
        latency_gain, throughput_gain: ratios to the model as configured, medians of the rounds.
        spread: the largest relative distance of a round's ratio from its median.
        cores: processor cores in use during a full batch.
        ready_s: seconds of the load and the warm-up.
        error: the largest difference from the outputs as configured, relative to their values.
        failure: why it was not measured; empty: it was.
    """

    runtime: Runtime
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


AS_CONFIGURED = Runtime("as configured", tuple(ArtifactType), {})


@dataclass(frozen=True, slots=True)
class Plan:
    """The model to tune.

    Attributes:
        folder: the model's folder.
        version: the version to measure.
        document: the complete config, as Triton's JSON.
        inputs: a safetensors file; None: the model's example, else made-up values.
        timeout_s: the time limit of each load.
        reduced: whether 16-bit types are tried.
    """

    folder: Path
    version: str
    document: Mapping[str, Any]
    inputs: Path | None
    timeout_s: float
    reduced: bool

    @property
    def rows(self) -> int:
        """The rows of a full batch."""
        return max(1, int(self.document["max_batch_size"]))

    def arguments(self, runtime: Runtime) -> dict[str, str]:
        """Return Triton's arguments for the model with the parameters of a runtime."""
        document = dict(self.document)
        if runtime is not AS_CONFIGURED:
            others = {
                key: entry
                for key, entry in document.get("parameters", {}).items()
                if key not in TUNED
            }
            changed = {key: {"string_value": text} for key, text in runtime.parameters.items()}
            document["parameters"] = {**others, **changed}
        return pbtxt.arguments(self.folder, self.version, document)


def measure(plan: Plan) -> Iterator[Row]:
    """Yield the figures of the model as configured, and then of each candidate that suits it.

    Raises:
        LoadError: the model as configured cannot be run.
    """
    with (
        tempfile.TemporaryDirectory(prefix="torch-py-backend-") as folder,
        Workers(plan.folder.name, _MEASURE, 1) as configured,
    ):
        facts = _load(plan, AS_CONFIGURED, folder, configured)
        yield _row(AS_CONFIGURED, facts, [_turn(plan, configured) for _ in range(_ROUNDS)], [])
        instance = plan.document["instance_group"][0]["kind"]
        for runtime in RUNTIMES:
            suits = ArtifactType[facts["kind"]] in runtime.kinds
            if suits and runtime.kind in ("", instance) and plan.reduced >= runtime.reduced:
                yield _candidate(plan, runtime, folder, configured)


def _load(plan: Plan, runtime: Runtime, folder: str, workers: Workers) -> dict[str, Any]:
    message = {
        "arguments": plan.arguments(runtime),
        "folder": folder,
        "rows": plan.rows,
        "inputs": None if plan.inputs is None else str(plan.inputs),
    }
    facts: dict[str, Any] = workers.ask([message], plan.timeout_s)[0]
    return facts


def _turn(plan: Plan, workers: Workers) -> dict[str, float]:
    """Return one measurement."""
    figures: dict[str, float] = workers.ask([{"seconds": _SECONDS}], plan.timeout_s)[0]
    return figures


def _candidate(plan: Plan, runtime: Runtime, folder: str, configured: Workers) -> Row:
    try:
        with Workers(plan.folder.name, _MEASURE, 1) as workers:
            facts = _load(plan, runtime, folder, workers)
            measured: tuple[list[dict[str, float]], ...] = ([], [])
            for turn in range(_ROUNDS):
                for number in (0, 1) if turn % 2 else (1, 0):
                    measured[number].append(_turn(plan, (workers, configured)[number]))
            return _row(runtime, facts, *measured)
    except LoadError as error:
        if not configured.alive:
            raise
        return Row(runtime, failure=str(error))


def _row(
    runtime: Runtime,
    facts: Mapping[str, Any],
    turns: list[dict[str, float]],
    configured: list[dict[str, float]],
) -> Row:
    """Return a row; without the turns of the model as configured, its gains are 1."""
    gains, spread = {"latency_ms": 1.0, "full_s": 1.0}, 0.0
    for figure in gains if configured else ():
        ratios = [
            before[figure] / after[figure] for before, after in zip(configured, turns, strict=True)
        ]
        gains[figure] = median(ratios)
        spread = max(spread, *(abs(ratio / gains[figure] - 1) for ratio in ratios))
    return Row(
        runtime,
        latency_ms=median(turn["latency_ms"] for turn in turns),
        latency_gain=gains["latency_ms"],
        throughput=facts["rows"] / median(turn["full_s"] for turn in turns),
        throughput_gain=gains["full_s"],
        spread=spread,
        cores=median(turn["cores"] for turn in turns),
        ready_s=facts["ready_s"],
        error=facts["error"],
    )


def best(rows: list[Row], max_error: float) -> Row | None:
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
