"""Time a candidate of `tune` beside the model as configured, in a child process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from torch_py_backend.config import model_config
from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.model_folders.inspection import batch, load_warm, run
from torch_py_backend.pipeline.differences import difference
from torch_py_backend.values import Item

# Calls before outputs are compared: TorchScript optimizes at the third call of a shape.
_FIRST_CALLS = 3
_ROUNDS = 5
_SECONDS = 0.2  # of one measurement


def measure(
    arguments: Mapping[str, str], configured: Mapping[str, str], rows: int
) -> dict[str, Any]:
    """Return the figures of `tuning.Row` for a candidate. A full batch has `rows` rows.

    The candidate is loaded first, in a process that has not compiled anything yet.

    Raises:
        LoadError: a model cannot be loaded or run.
        OutputError: the outputs differ in shape or in infinities.
    """
    began = time.perf_counter()
    candidate = load_warm(model_config.parse(arguments), (1, rows))
    ready_s = time.perf_counter() - began
    engines = candidate, load_warm(model_config.parse(configured), (1, rows))
    samples = batch(candidate, 1), batch(candidate, rows)
    # Seconds and cores of each model with each of the samples in each round.
    figures = np.zeros((2, len(engines), len(samples), _ROUNDS))
    with runtime.mode(candidate.config.options):
        error = max(_error(*engines, sample) for sample in samples)
        for turn in range(_ROUNDS):
            for number in (0, 1) if turn % 2 else (1, 0):
                for size, sample in enumerate(samples):
                    figures[:, number, size, turn] = _timed(engines[number], sample)
    seconds, cores = np.median(figures, axis=-1)[:, 0]
    ratios = figures[0, 1] / figures[0, 0]
    gains = np.median(ratios, axis=-1, keepdims=True)
    return {
        "kind": candidate.loaded.kind.name,
        "latency_ms": 1e3 * seconds[0],
        "latency_gain": gains.item(0),
        "throughput": rows / seconds[1],
        "throughput_gain": gains.item(1),
        "spread": np.abs(ratios / gains - 1).max(),
        "cores": cores[1],
        "ready_s": ready_s,
        "error": error,
    }


def _error(candidate: Engine, configured: Engine, sample: Item) -> float:
    """Return the largest difference from the outputs of the model as configured."""
    for _ in range(_FIRST_CALLS):
        outputs, references = run(candidate, sample), run(configured, sample)
    return max(difference(name, outputs[name], expected) for name, expected in references.items())


def _timed(engine: Engine, sample: Item) -> tuple[float, float]:
    """Return the mean seconds of a call, and the cores in use."""
    calls, began, used = 0, time.perf_counter(), time.process_time()
    while not calls or time.perf_counter() < began + _SECONDS:
        run(engine, sample)
        calls += 1
    elapsed = time.perf_counter() - began
    return elapsed / calls, (time.process_time() - used) / elapsed
