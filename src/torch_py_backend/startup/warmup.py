"""Sample batches before READY: nothing that a first call costs is left for a request."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from torch_py_backend.artifacts.discovery import Kind
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
from torch_py_backend.loading import example_inputs, sample_inputs
from torch_py_backend.sequences import state_store
from torch_py_backend.streaming import streams
from torch_py_backend.weights import gpu_sharing

log = logging.getLogger(__name__)

# TorchScript's profiling executor optimises at the third call of a shape.
_REPEATS = 3
# A model with one graph for many row counts meets all up to here before READY, and beyond it
# powers of two.
_EVERY = 32
# How often a warm-up that takes long says in the log how far it is.
_REPORT_S = 10.0

_Call: TypeAlias = "Callable[[Sequence[Item]], Sequence[Outcome]]"


def run(engine: Engine, *, serving: bool = False) -> None:
    """Call the engine with samples of every kind of batch.

    Args:
        engine: the model.
        serving: the model is served next. A made-up sample that fails is then a warning, where
            `_may_fail` allows it.

    Raises:
        LoadError: binding the outputs to forward()'s result failed.
        WarmupError: forward() failed, or its result contradicts the config.
    """
    call = streams.trial(engine) if engine.config.decoupled else engine.run
    compiles = "; torch.compile may take minutes" if engine.callee.compiles else ""
    log.info("model '%s': the warm-up begins%s.", engine.config.name, compiles)
    failures: list[_SampleError] = []
    with engine.preparing():
        try:
            for item in _reported(engine.config.name, batches(engine)):
                failures.extend(_prepare(engine, call, item, serving=serving))
        except NoServerError as error:
            _leave_out(engine, error)
    if failures:
        _warn(engine, failures[0])


def _reported(model: str, items: Iterator[Item]) -> Iterator[Item]:
    """The items; the log says every few seconds how many of them are done."""
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


class _SampleError(Exception):
    """A sample failed.

    Attributes:
        error: why.
        refusal: the sentence that fails the load.
    """

    def __init__(self, error: BackendError, refusal: LoadError) -> None:
        super().__init__(str(refusal))
        self.error = error
        self.refusal = refusal


def _may_fail(engine: Engine, error: BackendError) -> bool:
    """Whether a sample may fail with this error, and the model is served all the same.

    Only what made-up values can be the cause of, and only where the config does not depend on a
    warm-up that succeeds.
    """
    options = engine.config.options
    return (
        isinstance(error, ForwardError | HookError | InputError)
        and options.warmup is None
        and engine.recovery.fatal is None
        and not engine.callee.captures
        and not torch_compile.required(engine.config)
        # What its handler compiles cannot be kept from compiling when requests come.
        and not (engine.kind is Kind.TORCHSERVE and torch_compile.requested(engine.config))
        # What the model writes, other instances would read: the warm-up has to show that.
        and not gpu_sharing.wished(engine.config)
        and not engine.example()
    )


def _prepare(
    engine: Engine, call: _Call, item: Item, *, serving: bool
) -> tuple[()] | tuple[_SampleError]:
    """Pay what a first call with such an item would cost; return a failure that is no refusal."""
    try:
        _try(engine, call, item)
    except _SampleError as failure:
        if serving and _may_fail(engine, failure.error):
            return (failure,)
        failure.refusal.traceback = _report(engine)
        raise failure.refusal from None
    return ()


def _try(engine: Engine, call: _Call, item: Item) -> None:
    before = side_effects.copied(item)
    items = sample_inputs.requests(engine.config, item)
    for _ in range(_REPEATS):
        outcomes = _tried(engine, call, items)
    engine.purity.compare(before, item)
    # The first step of a sequence is followed by others, whose states may have grown.
    for _ in range(_REPEATS if engine.config.states else 0):
        steps = zip(items, outcomes, strict=True)
        outcomes = _tried(
            engine, call, [state_store.following(engine.config, *one) for one in steps]
        )


def _tried(engine: Engine, call: _Call, items: Sequence[Item]) -> list[dict[str, Value]]:
    results = []
    for item, outcome in zip(items, call(items), strict=True):
        if isinstance(outcome, NoServerError):
            raise outcome
        if isinstance(outcome, BackendError):
            raise _SampleError(outcome, _refusal(engine.config, item, outcome))
        results.append(outcome)
    return results


def _warn(engine: Engine, failure: _SampleError) -> None:
    """Log that the model is served although samples failed; with the first one's traceback."""
    consequence = "It is served all the same; first requests pay for what first calls cost."
    if engine.callee.compiles:
        consequence = "It is served all the same; what needs another graph runs eagerly."
    traceback = next((text for _, text in engine.recovery.reports if text), "")
    log.warning("%s %s\n%s", failure.refusal, consequence, traceback)
    engine.recovery.reports.clear()


def _leave_out(engine: Engine, error: NoServerError) -> None:
    """A model that calls others is tried where they are."""
    engine.recovery.reports.clear()
    log.warning(
        "model '%s': the warm-up is left out, for the model calls another. %s",
        engine.config.name,
        error,
    )


def _report(engine: Engine) -> str:
    """Leave the traceback to the server's log, and return it: the refusal has one sentence."""
    reports = list(engine.recovery.reports)
    for sentence, text in reports:
        log.error("%s\n%s", sentence, text)
    engine.recovery.reports.clear()
    return "\n".join(text for _, text in reports)


def _refusal(config: ModelConfig, item: Item, error: BackendError) -> LoadError:
    if isinstance(error, LoadError):
        return error
    return WarmupError(
        config.name,
        f"the warm-up with {_shapes(item)} failed: {error}",
        cure="Correct the model or its config. If it cannot take made-up values (ones, random"
        ' numbers below 1, the string "text"), put valid ones beside it'
        f' ({example_inputs.NAME}.safetensors), or set the parameter WARMUP to "false".',
    )


def batches(engine: Engine) -> Iterator[Item]:
    """One item for every batch that may need preparation of its own."""
    config = engine.config
    example = _fitting(config, engine.example())
    # What hooks take may be no smaller: bytes of a file in an example, say.
    fixed = example and engine.hooks
    varies = not fixed and any(
        -1 in spec.dims for spec in config.inputs if spec.origin is not Origin.STATE
    )
    for rows, shrunk, without in itertools.product(
        _row_counts(engine), (False, True) if varies else (False,), engine.patterns
    ):
        item = sample_inputs.item(config, rows, shrunk=shrunk, without=without, example=example)
        if item or rows is None:  # without an input there is no row count
            yield item


def _fitting(config: ModelConfig, example: Item) -> Item:
    """The examples that the config's inputs can have."""
    found = {}
    for spec in config.inputs:
        value = example.get(spec.name)
        if value is None:
            continue
        if sample_inputs.fits(config, spec, value):
            found[spec.name] = value
        else:
            log.warning(
                "model '%s': the example of input '%s' is %s %s, and config.pbtxt has %s; the"
                " warm-up makes one up.",
                config.name,
                spec.name,
                str(value.dtype).removeprefix("torch."),
                list(value.shape),
                spec,
            )
    return found


def _row_counts(engine: Engine) -> Sequence[int | None]:
    largest = engine.config.max_batch_size
    if largest == 0:
        return [None]
    if engine.callee.rows.buckets:
        return engine.callee.rows.buckets[::-1]
    if engine.callee.compiles:
        # A graph for all row counts may have a guard that only some of them pass.
        every = largest if torch_compile.static(engine.config) else min(largest, _EVERY)
        counts = {*range(1, every + 1), *batch_buckets.powers_of_two(largest)}
        return sorted(counts, reverse=True)
    return sorted({largest, max(1, largest - 1), 1}, reverse=True)
