"""The warm-up: calls with sample batches before READY, so that no request pays for first calls."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.batching.gather_scatter import Item, Outcome, Value
from torch_py_backend.compile import batch_buckets, torch_compile
from torch_py_backend.config.model_config import ModelConfig, Origin
from torch_py_backend.engine import side_effects
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import (
    BackendError,
    ForwardError,
    HookError,
    InputError,
    LoadError,
    NoServerError,
    WarmupError,
)
from torch_py_backend.loading import example_inputs
from torch_py_backend.sequences import state_store
from torch_py_backend.streaming import streams
from torch_py_backend.weights import gpu_sharing

log = logging.getLogger(__name__)

# TorchScript's profiling executor optimizes at the third call of a shape.
_REPEATS = 3
# A model with one graph for many row counts is called with every row count up to this number, and
# with powers of two above it.
_EVERY_ROW_COUNT = 32
# Seconds between two reports of progress.
_REPORT_S = 10.0

_Call: TypeAlias = "Callable[[Sequence[Item]], Sequence[Outcome]]"


class _SampleError(Exception):
    """The failure of a sample.

    Attributes:
        error: the outcome of the call.
        load_error: the error that fails the load.
    """

    def __init__(self, error: BackendError, load_error: LoadError) -> None:
        super().__init__(str(load_error))
        self.error = error
        self.load_error = load_error


def run(engine: Engine, *, serving: bool = False) -> None:
    """Call the engine with a sample of every kind of batch.

    Args:
        engine: the model.
        serving: whether the model is served next. Then a made-up sample that fails is a warning,
            where `_may_fail` allows it.

    Raises:
        LoadError: the outputs of the config do not fit the result of forward().
        WarmupError: forward() failed, or its result contradicts the config.
    """
    model = engine.config.name
    call = streams.trial(engine) if engine.config.decoupled else engine.run
    compiles = "; torch.compile may take minutes" if engine.callee.compiles else ""
    log.info("model '%s': the warm-up begins%s.", model, compiles)
    failures: list[_SampleError] = []
    with engine.preparing():
        try:
            for item in _reported(model, batches(engine)):
                failure = _try(engine, call, item)
                if failure is None:
                    continue
                if not (serving and _may_fail(engine, failure.error)):
                    failure.load_error.traceback = _log_reports(engine)
                    raise failure.load_error
                failures.append(failure)
        except NoServerError as error:
            engine.recovery.reports.clear()
            log.warning(
                "model '%s': the warm-up is skipped: the model calls another model. %s",
                model,
                error,
            )
    if failures:
        _warn(engine, failures[0])


def _reported(model: str, items: Iterator[Item]) -> Iterator[Item]:
    """Yield the items and log the progress every few seconds."""
    began = reported = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - reported >= _REPORT_S:
            reported = now
            log.info(
                "model '%s': %d batches of the warm-up took %.0f s; the next one is %s.",
                model,
                done,
                now - began,
                _shapes(item),
            )
        yield item


def _shapes(item: Item) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in item.items())


def _try(engine: Engine, call: _Call, item: Item) -> _SampleError | None:
    """Call the engine with a sample until a request of this kind costs no first call."""
    before = side_effects.copy_tensors(item)
    items = example_inputs.requests(engine.config, item)
    try:
        for _ in range(_REPEATS):
            outcomes = _call_once(engine, call, items)
        engine.purity.compare(before, item)
        # Later steps of a sequence, whose states may have grown.
        for _ in range(_REPEATS if engine.config.states else 0):
            steps = zip(items, outcomes, strict=True)
            outcomes = _call_once(
                engine, call, [state_store.next_item(engine.config, *step) for step in steps]
            )
    except _SampleError as failure:
        return failure
    return None


def _call_once(engine: Engine, call: _Call, items: Sequence[Item]) -> list[dict[str, Value]]:
    results = []
    for item, outcome in zip(items, call(items), strict=True):
        if isinstance(outcome, NoServerError):
            raise outcome
        if isinstance(outcome, LoadError):
            raise _SampleError(outcome, outcome)
        if isinstance(outcome, BackendError):
            load_error = WarmupError(
                engine.config.name,
                f"the warm-up with {_shapes(item)} failed: {outcome}",
                cure="Correct the model or its config. If it cannot take made-up values (ones,"
                ' random numbers below 1, the string "text"), put valid ones beside it'
                f' ({example_inputs.NAME}.safetensors), or set the parameter WARMUP to "false".',
            )
            raise _SampleError(outcome, load_error)
        results.append(outcome)
    return results


def _may_fail(engine: Engine, error: BackendError) -> bool:
    """Return whether the model is served although a sample failed with this error.

    It is if made-up values can be the cause, and if the config does not depend on a successful
    warm-up.
    """
    options = engine.config.options
    return (
        isinstance(error, ForwardError | HookError | InputError)
        and options.warmup is None
        and engine.recovery.fatal is None
        and not engine.callee.captures
        and not torch_compile.required(engine.config)
        # Compilation by a TorchServe handler cannot be disabled once requests come.
        and not (engine.kind is ArtifactType.TORCHSERVE and torch_compile.requested(engine.config))
        # Other instances read the same memory: the warm-up must show that the model does not write.
        and not gpu_sharing.requested(engine.config)
        and not engine.example()
    )


def _warn(engine: Engine, failure: _SampleError) -> None:
    """Log that the model is served although samples failed, with the first traceback."""
    consequence = "It is served all the same; the first requests may take longer."
    if engine.callee.compiles:
        consequence = "It is served all the same; calls that need another graph run eagerly."
    traceback = next((text for _, text in engine.recovery.reports if text), "")
    log.warning("%s %s\n%s", failure.load_error, consequence, traceback)
    engine.recovery.reports.clear()


def _log_reports(engine: Engine) -> str:
    """Log the engine's reports and return their tracebacks."""
    reports = list(engine.recovery.reports)
    for sentence, text in reports:
        log.error("%s\n%s", sentence, text)
    engine.recovery.reports.clear()
    return "\n".join(text for _, text in reports)


def batches(engine: Engine) -> Iterator[Item]:
    """Yield an item for each kind of batch whose first call may be slow."""
    config = engine.config
    example = _fitting(config, engine.example())
    # Hooks may not take smaller examples, such as a part of the bytes of a file.
    fixed = example and engine.hooks
    varies = not fixed and any(
        -1 in spec.dims for spec in config.inputs if spec.origin is not Origin.STATE
    )
    for rows, shrunk, without in itertools.product(
        _row_counts(engine), (False, True) if varies else (False,), engine.patterns
    ):
        item = example_inputs.item(config, rows, shrunk=shrunk, without=without, example=example)
        if item or rows is None:  # an item without inputs has no row count
            yield item


def _fitting(config: ModelConfig, example: Item) -> Item:
    """Return the example values that fit the config."""
    fitting = {}
    for spec in config.inputs:
        value = example.get(spec.name)
        if value is None:
            continue
        if example_inputs.fits(config, spec, value):
            fitting[spec.name] = value
        else:
            log.warning(
                "model '%s': the example of input '%s' is %s %s, and config.pbtxt has %s; the"
                " warm-up uses made-up values instead.",
                config.name,
                spec.name,
                str(value.dtype).removeprefix("torch."),
                list(value.shape),
                spec,
            )
    return fitting


def _row_counts(engine: Engine) -> Sequence[int | None]:
    largest = engine.config.max_batch_size
    if largest == 0:
        return [None]
    if engine.callee.rows.buckets:
        return engine.callee.rows.buckets[::-1]
    if engine.callee.compiles:
        # A graph for all row counts may have guards that only some row counts pass.
        every = (
            largest
            if torch_compile.static_shapes(engine.config)
            else min(largest, _EVERY_ROW_COUNT)
        )
        counts = {*range(1, every + 1), *batch_buckets.powers_of_two(largest)}
        return sorted(counts, reverse=True)
    return sorted({largest, max(1, largest - 1), 1}, reverse=True)
