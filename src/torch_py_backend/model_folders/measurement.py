"""Time a candidate of `tune` beside the model as configured, in a child process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from torch_py_backend.config import model_config
from torch_py_backend.engine import runtime
from torch_py_backend.model_folders.inspection import batch, load_warm, run
from torch_py_backend.pipeline.differences import difference

# Calls before outputs are compared: TorchScript optimizes at the third call of a shape.
_FIRST_CALLS = 3
_ROUNDS = 5
_SECONDS = 0.2  # of one measurement


def measure(arguments: Mapping[str, str], configured: Mapping[str, str]) -> dict[str, Any]:
    """Return the figures of `tuning.Row` for a candidate.

    The candidate is loaded first, in a process that has not compiled anything yet.

    Raises:
        LoadError: a model cannot be loaded or run.
        OutputError: the outputs differ in shape or in infinities.
    """
    settings = [model_config.parse(each) for each in (arguments, configured)]
    full = max(1, settings[0].max_batch_size)
    began = time.perf_counter()
    engines = [load_warm(settings[0], (1, full))]
    ready_s = time.perf_counter() - began
    engines.append(load_warm(settings[1], (1, full)))
    samples = [batch(engines[0], rows) for rows in (1, full)]
    errors = []
    # Seconds of a call of each model with each of the samples in each round.
    seconds = np.zeros((len(engines), len(samples), _ROUNDS))
    with runtime.mode(settings[0].options):
        for sample in samples:
            for _ in range(_FIRST_CALLS):
                outputs, references = (run(engine, sample) for engine in engines)
            errors += [difference(name, outputs[name], references[name]) for name in references]
        for turn in range(_ROUNDS):
            for number in (0, 1) if turn % 2 else (1, 0):
                for size, sample in enumerate(samples):
                    calls, began = 0, time.perf_counter()
                    while not calls or time.perf_counter() < began + _SECONDS:
                        run(engines[number], sample)
                        calls += 1
                    seconds[number, size, turn] = (time.perf_counter() - began) / calls
    latency, of_batch = np.median(seconds[0], axis=-1)
    ratios = seconds[1] / seconds[0]
    gains = np.median(ratios, axis=-1, keepdims=True)
    return {
        "kind": engines[0].loaded.kind.name,
        "latency_ms": 1e3 * latency,
        "latency_gain": gains.item(0),
        "throughput": full / of_batch,
        "throughput_gain": gains.item(1),
        "spread": np.abs(ratios / gains - 1).max(),
        "ready_s": ready_s,
        "error": max(errors),
    }
