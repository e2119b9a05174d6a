"""Load a model without a server: describe it, compare it with a reference, measure it.

To be run in a child process, because it runs the model's code.

The reference is the same model as loaded, without any optimization. The error of an output is the
largest |value - reference| / (|reference| + typical) over all batch sizes, where typical is the
median of |reference| without zeros. Neither values close to zero nor a mask of -1e9 distort this
measure. The error of integers, booleans and strings is the share of values that differ.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from torch_py_backend.artifacts import discovery
from torch_py_backend.batching import gather_scatter, runtime
from torch_py_backend.batching.gather_scatter import Item, Value
from torch_py_backend.config import model_config, threads, tuned_settings
from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.config.options import TABLE
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import (
    ArtifactError,
    BackendError,
    ConfigError,
    LoadError,
    OutputError,
    WarmupError,
    summarize,
)
from torch_py_backend.loading import example_inputs
from torch_py_backend.signature import binding
from torch_py_backend.startup import builder, warmup

# The least number of calls of a measurement, however long they take.
_FEWEST_CALLS = 3
_POLL_S = 0.001
_INPUTS = "inputs.pt"


class _Warnings(logging.Handler):
    """A log handler that collects the package's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []
        self.logger = logging.getLogger("torch_py_backend")
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


def warm_up(engine: Engine) -> None:
    """Warm up a model as a server would."""
    if engine.config.options.warmup is not False:
        with runtime.mode(engine.config.options):
            warmup.run(engine)


# --- the description -----------------------------------------------------------------------------


def inspect(arguments: Mapping[str, str]) -> dict[str, Any]:
    """Load and warm up a model.

    Args:
        arguments: Triton's arguments of `initialize`.

    Returns:
        Artifact, weights, signature, the rule that binds inputs to arguments, inputs, outputs,
        max_batch_size, options in force and warnings, as JSON.

    Raises:
        LoadError: the model cannot be served.
    """
    warnings = _Warnings()
    warnings.logger.propagate = False
    settings = tuned_settings.apply(model_config.parse(arguments))
    share = threads.budget(settings)
    engine = builder.build(settings, share)
    warm_up(engine)
    engine.leave()
    sent = [spec.name for spec in _sent(engine.config)]
    # Inputs of hooks are bound to the hooks' own methods.
    rule = "" if engine.hooks else binding.rule(sent, engine.loaded.signature).value
    artifact = discovery.find(settings)
    if artifact.fallback is not None and engine.kind is not artifact.kind:
        artifact = artifact.fallback  # the package is for another machine
    inputs = {spec.name: _described(spec) for spec in engine.config.inputs}
    inputs |= {state.input: f"{state.input} (state)" for state in settings.untyped_states}
    inputs |= {spec.name: str(spec) for spec in settings.batch_inputs}
    return {
        "artifact": f"{artifact.path.name}: {artifact.kind.value}",
        "weights": str(engine.sharing),
        "signature": engine.signature,
        "hooks": str(engine.hooks or ""),
        "binding": rule,
        "inputs": [f"{text} → {engine.places[name]}" for name, text in inputs.items()],
        "outputs": [
            *map(_described, settings.outputs),
            *(f"{state.output} (state)" for state in settings.untyped_states),
        ],
        "max_batch_size": settings.max_batch_size,
        "threads": {"intra_op": share.intra_op, "inter_op": share.inter_op},
        "options": {
            row.key: getattr(settings.options, row.field)
            for row in TABLE
            if getattr(settings.options, row.field) != row.default
        },
        "warnings": warnings.sentences,
    }


def _described(spec: TensorSpec) -> str:
    return str(spec) if spec.origin is Origin.CLIENT else f"{spec} ({spec.origin.value})"


# --- the reference -------------------------------------------------------------------------------


def prepare(arguments: Mapping[str, str], folder: str, inputs: str | None) -> dict[str, str]:
    """Write the inputs and the reference's outputs, for `measure`.

    Args:
        arguments: Triton's arguments of `initialize`, with the settings of the reference.
        folder: the folder to write into.
        inputs: a safetensors file with inputs by name; None for examples, else made-up values.

    Returns:
        The artifact's kind and the source of the inputs.

    Raises:
        LoadError: the model cannot be run, or the inputs do not fit it.
    """
    settings = model_config.parse(arguments)
    engine = builder.build(settings, threads.budget(settings))
    settings = engine.config  # with the sequence controls that the model takes
    warm_up(engine)
    item, source = find_inputs(settings, inputs)
    torch.save(item, Path(folder) / _INPUTS)
    for rows in sizes(settings):
        torch.save(_run(engine, tile(settings, item, rows)), Path(folder) / _reference(rows))
    return {"kind": engine.kind.name, "inputs": source}


def sizes(settings: ModelConfig) -> list[int]:
    """Return the batch sizes to measure: powers of two and the largest; 1 without batching."""
    largest = max(1, settings.max_batch_size)
    powers = [1 << power for power in range(largest.bit_length())]
    return sorted({*powers, largest})


def _reference(rows: int) -> str:
    return f"reference_{rows}.pt"


def read_values(path: Path) -> dict[str, Value]:
    """Return inputs or outputs that `prepare` wrote."""
    values: dict[str, Value] = torch.load(path, "cpu", weights_only=False)
    return values


def find_inputs(settings: ModelConfig, inputs: str | None) -> tuple[Item, str]:
    """Return the inputs of a file, else the model's examples, else made-up values; their source.

    Raises:
        LoadError: the inputs cannot be read, or do not fit the config.
    """
    torch.manual_seed(0)
    if inputs is None:
        example = example_inputs.find(settings, discovery.find(settings))
        if example is None:
            return example_inputs.item(settings, settings.max_batch_size or None), "made-up values"
        item, source = example, example_inputs.NAME
    else:
        source = Path(inputs).name
        try:
            item = dict(safetensors.torch.load_file(inputs))
        except (safetensors.SafetensorError, OSError) as error:
            raise ArtifactError(
                settings.name,
                f"the inputs in {source} cannot be read: {summarize(error)}",
                expected="a file that safetensors.torch.save_file wrote",
            ) from error
    _check_inputs(settings, item, source)
    return item, source


def _check_inputs(settings: ModelConfig, item: Item, source: str) -> None:
    """Raise for names, types and sizes that Triton refuses in a request."""
    specs = {spec.name: spec for spec in settings.inputs}
    needed = {spec.name for spec in _sent(settings) if not spec.optional}
    if not needed <= item.keys() <= specs.keys():
        raise ConfigError(
            settings.name,
            f"{source} has {', '.join(sorted(item)) or 'no inputs'}",
            expected=f"the inputs {', '.join(sorted(specs))}",
        )
    for name, value in item.items():
        if not example_inputs.fits(settings, specs[name], value):
            kind = str(value.dtype).removeprefix("torch.")
            rows = "one row at least of " if settings.max_batch_size else ""
            raise ConfigError(
                settings.name,
                f"the input '{name}' in {source} is {kind} {list(value.shape)}",
                expected=f"{rows}{specs[name]}",
            )


def tile(settings: ModelConfig, item: Item, rows: int) -> Item:
    """Return a batch of this many rows, which repeats the item's rows."""
    absent = {spec.name for spec in _sent(settings)} - item.keys()
    count = rows if settings.max_batch_size else None
    return example_inputs.item(settings, count, without=absent, example=item)


def _sent(settings: ModelConfig) -> Iterator[TensorSpec]:
    """Yield the inputs that clients send: not the states and controls of a sequence."""
    return (spec for spec in settings.inputs if spec.origin is Origin.CLIENT)


def _run(engine: Engine, item: Item) -> dict[str, Value]:
    results = []
    for outcome in engine.run(example_inputs.requests(engine.config, item)):
        if isinstance(outcome, LoadError):
            raise outcome
        if isinstance(outcome, BackendError):
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in item.items())
            raise WarmupError(engine.config.name, f"the call with {shapes} failed: {outcome}")
        results.append(outcome)
    names = tuple(results[0])
    joined = gather_scatter.join([[result[name] for name in names] for result in results])
    return dict(zip(names, joined, strict=True))


# --- a candidate -------------------------------------------------------------------------------


def measure(
    arguments: Mapping[str, str],
    folder: str,
    seconds: float,
    watched: Sequence[str],
    place: tuple[int, int, str],
) -> dict[str, Any]:
    """Load a candidate, compare its outputs with the reference, and time it.

    Args:
        arguments: Triton's arguments of `initialize`, with the candidate's settings.
        folder: the folder into which `prepare` wrote.
        seconds: duration of the measurement of each batch size.
        watched: parameters that must have an effect.
        place: this instance's number, the number of instances, and a name that they share. They
            measure each batch size at the same time.

    Raises:
        LoadError: the candidate cannot be loaded or run.
        OutputError: its outputs differ from the reference's in shape or in infinities.
    """
    started = time.perf_counter()
    warnings = _Warnings()
    settings = model_config.parse(arguments)
    engine = builder.build(settings, threads.budget(settings))
    settings = engine.config
    # A parameter that is unknown or has no effect would make the row misleading. The warm-up,
    # which may compile for minutes, comes later.
    for sentence in warnings.sentences:
        if not set(watched).isdisjoint(sentence.split()):
            raise ConfigError.from_message(sentence)
    with runtime.mode(settings.options):
        warm_up(engine)
        item = read_values(Path(folder) / _INPUTS)
        batches = {rows: tile(settings, item, rows) for rows in sizes(settings)}
        errors = [
            _error(engine, batch, read_values(Path(folder) / _reference(rows)))
            for rows, batch in batches.items()
        ]
        load_s = time.perf_counter() - started
        times = {}
        for rows, batch in batches.items():
            _wait_for_all(Path(folder), rows, place)
            times[rows] = list(_timed(partial(_run, engine, batch), seconds))
    return {
        "latency_ms": 1e3 * median(times[1]),
        "p99_ms": 1e3 * float(np.quantile(times[1], 0.99)),
        "throughput": {rows: rows * len(calls) / sum(calls) for rows, calls in times.items()},
        "memory_mb": psutil.Process().memory_full_info().pss / (1 << 20),
        "device_memory_mb": torch.cuda.memory_reserved() / (1 << 20)
        if torch.cuda.is_available()
        else 0.0,
        "error": max(errors),
        "load_s": load_s,
    }


def _timed(call: Callable[[], object], seconds: float) -> Iterator[float]:
    until = time.perf_counter() + seconds
    calls = 0
    while calls < _FEWEST_CALLS or time.perf_counter() < until:
        before = time.perf_counter()
        call()
        yield time.perf_counter() - before
        calls += 1


def _wait_for_all(folder: Path, rows: int, place: tuple[int, int, str]) -> None:
    """Wait until all instances reach this batch size; the parent enforces the time limit."""
    number, count, name = place
    (folder / f"{name}-{rows}-{number}").touch()
    while any(not (folder / f"{name}-{rows}-{other}").exists() for other in range(count)):
        time.sleep(_POLL_S)


# --- comparison --------------------------------------------------------------------------------


def _error(engine: Engine, batch: Item, reference: Mapping[str, Value]) -> float:
    """Return the largest error of a batch's outputs."""
    # The first calls of a shape may differ from later ones: TorchScript optimizes at the third.
    for _ in range(_FEWEST_CALLS):
        outputs = _run(engine, batch)
    return max(
        difference(engine.config.name, name, outputs[name], expected)
        for name, expected in reference.items()
    )


def difference(model: str, name: str, actual: Value, expected: Value) -> float:
    """Return the error of an output, as the module's docstring defines it.

    Raises:
        OutputError: it differs in shape, or has infinities or NaN in other places.
    """
    if actual.shape != expected.shape:
        raise OutputError(
            model,
            f"output '{name}' is {list(actual.shape)}",
            expected=f"{list(expected.shape)}, as in eager",
        )
    if 0 in expected.shape:
        return 0.0
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        pairs = zip(_encoded(actual), _encoded(expected), strict=True)
        return float(np.mean([text != wanted for text, wanted in pairs]))
    if not expected.is_floating_point():
        return (actual != expected).double().mean().item()
    return _relative(model, name, actual.double(), expected.double())


def _encoded(strings: Value) -> list[bytes]:
    return [text if isinstance(text, bytes) else text.encode() for text in np.ravel(strings)]


def _relative(model: str, name: str, actual: Tensor, expected: Tensor) -> float:
    finite = expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if not torch.where(finite, actual.isfinite(), same).all():
        raise OutputError(
            model,
            f"output '{name}' has infinities or NaN in other places",
            expected="them where eager has them",
        )
    actual, expected = actual[finite], expected[finite]
    if not expected.numel():
        return 0.0
    size = expected.abs()
    typical = size[size > 0].median() if size.any() else torch.tensor(1.0)
    return ((actual - expected).abs() / (size + typical)).max().item()
