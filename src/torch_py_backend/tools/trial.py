"""Load a model without a server: describe it, compare it with a reference, measure it.

To be run in a child process, because it runs the model's code. `arguments` are Triton's arguments
of `initialize`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from logging.handlers import BufferingHandler
from typing import Any

import numpy as np
import torch

from torch_py_backend.config import model_config, threads
from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.engine import load, runtime, streams, warmup
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, LoadError, OutputError
from torch_py_backend.loading import example_inputs
from torch_py_backend.pipeline import batches
from torch_py_backend.pipeline.differences import MAX_ERROR_REDUCED, difference, tolerance
from torch_py_backend.signature import binding
from torch_py_backend.values import Item, Value

# Calls before outputs are compared: TorchScript optimizes at the third call of a shape.
_FIRST_CALLS = 3
_ROUNDS = 5
_SECONDS = 0.2  # of one measurement
_MOST_WARNINGS = 10_000


def _load(settings: ModelConfig, row_counts: Sequence[int] = ()) -> Engine:
    """Load a model, and warm it up as a server would, or for some row counts only."""
    engine = load.build(settings, threads.budget(settings))
    if settings.options.warmup is not False:
        with runtime.mode(settings.options):
            call = streams.trial(engine) if settings.decoupled else None
            rows = row_counts if settings.max_batch_size else ()
            warmup.run(engine, call, row_counts=rows)
    return engine


# --- the description -----------------------------------------------------------------------------


def inspect(arguments: Mapping[str, str], reference: str | None = None) -> dict[str, Any]:
    """Load and warm up a model; return what it is, takes and gives, as JSON.

    `reference` is a file with outputs for the example beside the model, to compare with its own.

    Raises:
        LoadError: the model cannot be served.
        OutputError: its outputs differ from the reference.
    """
    logger = logging.getLogger("torch_py_backend")
    logger.propagate = False
    warnings = BufferingHandler(_MOST_WARNINGS)
    warnings.setLevel(logging.WARNING)
    logger.addHandler(warnings)
    settings = model_config.parse(arguments)
    engine = _load(settings)
    if reference is not None:
        with runtime.mode(settings.options):
            _compare(engine, reference)
    engine.close()
    sent = [spec.name for spec in engine.config.inputs if spec.origin is Origin.CLIENT]
    # Inputs of hooks are bound to the hooks' own methods.
    rule = "" if engine.hooks else binding.rule(sent, engine.loaded.signature).value
    inputs = {spec.name: _described(spec) for spec in engine.config.inputs}
    inputs |= {spec.name: str(spec) for spec in settings.batch_inputs}
    bound = engine.inputs.binding
    places = dict(zip(bound.names, bound.places, strict=True))
    return {
        **load.report(engine),
        "signature": str(engine.loaded.signature),
        "hooks": str(engine.hooks or ""),
        "binding": rule,
        "inputs": [f"{text} → {places[name]}" for name, text in inputs.items()],
        "outputs": [_described(spec) for spec in settings.outputs],
        "max_batch_size": settings.max_batch_size,
        "threads": dataclasses.asdict(threads.budget(settings)),
        "warnings": [record.getMessage() for record in warnings.buffer],
    }


def _compare(engine: Engine, reference: str) -> None:
    """Raise OutputError if the outputs for the example differ from those in a file.

    A batch of the example's first row alone must have the outputs of that row, where they have the
    same sizes: a module, or its hooks, may pad to the longest row of a batch.
    """
    expected: Item = torch.load(reference, "cpu", weights_only=False)
    rows = next(iter(expected.values())).shape[0] if engine.config.max_batch_size else 1
    _compare_outputs(
        engine,
        _run(engine, _batch(engine, rows)),
        expected,
        "of the saved model differs from the module's own by",
        "Check that the module can be built again from model_kwargs and its weights, that its"
        " answers are not random, and that its code does not depend on the values of its inputs if"
        " it is exported or traced.",
    )
    if rows > 1:
        outputs = _run(engine, _batch(engine, 1))
        first = {name: value[:1] for name, value in expected.items()}
        _compare_outputs(
            engine,
            outputs,
            {name: row for name, row in first.items() if row.shape == outputs[name].shape},
            "for a batch of one row differs from the module's own by",
            "Set max_batch_size to 0 if the rows of a batch depend on each other; else check that"
            " the code does not depend on the number of rows.",
        )


def _compare_outputs(
    engine: Engine, outputs: Item, references: Item, problem: str, cure: str
) -> None:
    for name, expected in references.items():
        error = difference(name, outputs[name], expected)
        limit = tolerance(expected)
        if engine.config.options.optimize:  # such as bf16
            limit = MAX_ERROR_REDUCED
        if not error <= limit:
            raise OutputError(
                f"output '{name}' {problem} {error:.2g}",
                expected=f"at most {limit:g}",
                cure=cure,
            )


def _described(spec: TensorSpec) -> str:
    return str(spec) if spec.origin is Origin.CLIENT else f"{spec} ({spec.origin.value})"


# --- calls -----------------------------------------------------------------------------------


def _batch(engine: Engine, rows: int) -> Item:
    """Return the warm-up's batch of this many rows: of the model's example, else made up."""
    return next(warmup.batches(engine, [rows if engine.config.max_batch_size else None]))


def _run(engine: Engine, item: Item) -> dict[str, Value]:
    results = []
    for outcome in engine.run(example_inputs.requests(engine.config, item)):
        if isinstance(outcome, LoadError):
            raise outcome
        if isinstance(outcome, BackendError):
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in item.items())
            raise LoadError(f"the call with {shapes} failed: {outcome}")
        results.append(outcome)
    names = tuple(results[0])
    joined = batches.join([[result[name] for name in names] for result in results])
    return dict(zip(names, joined, strict=True))


# --- measuring -----------------------------------------------------------------------------------


def measure(
    arguments: Mapping[str, str], configured: Mapping[str, str], rows: int
) -> dict[str, Any]:
    """Return the figures of `tuning.Row` for a candidate, timed beside the model as configured.

    The candidate is loaded first, in a process that has not compiled anything yet. A full batch has
    `rows` rows.

    Raises:
        LoadError: a model cannot be loaded or run.
        OutputError: the outputs differ in shape or in infinities.
    """
    began = time.perf_counter()
    candidate = _load(model_config.parse(arguments), (1, rows))
    ready_s = time.perf_counter() - began
    engines = candidate, _load(model_config.parse(configured), (1, rows))
    samples = _batch(candidate, 1), _batch(candidate, rows)
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
        "kind": candidate.kind.name,
        "latency_ms": 1e3 * seconds[0],
        "latency_gain": gains.item(0),
        "throughput": rows / seconds[1],
        "throughput_gain": gains.item(1),
        "spread": np.abs(ratios / gains - 1).max(),
        "cores": cores[1],
        "ready_s": ready_s,
        "error": error,
    }


def _error(candidate: Engine, configured: Engine, batch: Item) -> float:
    """Return the largest difference from the outputs of the model as configured."""
    for _ in range(_FIRST_CALLS):
        outputs, references = _run(candidate, batch), _run(configured, batch)
    return max(difference(name, outputs[name], expected) for name, expected in references.items())


def _timed(engine: Engine, batch: Item) -> tuple[float, float]:
    """Return the mean seconds of a call, and the cores in use."""
    calls, began, used = 0, time.perf_counter(), time.process_time()
    while not calls or time.perf_counter() < began + _SECONDS:
        _run(engine, batch)
        calls += 1
    elapsed = time.perf_counter() - began
    return elapsed / calls, (time.process_time() - used) / elapsed
