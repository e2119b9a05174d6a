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
    join_names,
)
from torch_py_backend.loading import example_inputs
from torch_py_backend.sequences import state_store
from torch_py_backend.startup import model_state, row_check
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


def run(
    engine: Engine, *, serving: bool = False, row_counts: Sequence[int | None] = ()
) -> list[str]:
    """Call the engine with a sample of every kind of batch.

    Return the attributes of the model that have changed and cannot be put back; see `ModelState`.

    Args:
        engine: the model.
        serving: whether the model is served next. Then a made-up sample that fails is a warning,
            where `_may_fail` allows it.
        row_counts: the only row counts that are going to be called; empty: any.

    Raises:
        LoadError: the outputs of the config do not fit the result of forward(), or the rows of a
            batch, which auto-completion has chosen, depend on each other.
        WarmupError: forward() failed, or its result contradicts the config.
    """
    model = engine.config.name
    call = streams.trial(engine) if engine.config.decoupled else engine.run
    compiles = "; torch.compile may take minutes" if engine.runner.compiles else ""
    log.info("model '%s': the warm-up begins%s.", model, compiles)
    first: LoadError | None = None
    state = model_state.ModelState(engine)
    with engine.preparing():
        try:
            for sample in log_progress(model, batches(engine, row_counts)):
                failed = _run_sample(engine, call, sample)
                if failed is None:
                    continue
                item, error = failed
                failure = error if isinstance(error, LoadError) else _failure(model, item, error)
                failure.traceback = error.traceback
                if not (serving and _may_fail(engine, error)):
                    if error.reported:
                        log.error("%s\n%s", error, error.traceback)
                    raise failure
                first = first or failure
            if not row_counts:
                counts = [count for count in _row_counts(engine) if count and count > 1]
                row_check.check(engine.config, call, _example(engine), min(counts, default=0))
        except NoServerError as error:
            log.warning(
                "model '%s': the warm-up is skipped: the model calls another model. %s",
                model,
                error,
            )
        if engine.padding is not None:
            item = example_inputs.item(engine.config, 1, example=_example(engine))
            for shorter in engine.padding.shortened(item):
                call([shorter])  # it may fail: inputs may have to be of the same length
            engine.padding.choose_cuts()
        changed = state.put_back()
    if first is not None:
        consequence = "the first requests may take longer."
        if engine.runner.compiles:
            consequence = "calls that need another graph run eagerly."
        log.warning("%s The model is served anyway; %s\n%s", first, consequence, first.traceback)
    return changed


def warn_of_changes(config: ModelConfig, changed: Sequence[str]) -> None:
    """Log a warning that the model is built again, because the warm-up has changed attributes."""
    log.warning(
        "model '%s': the warm-up has changed %s of the model, and answers may depend on that. The"
        " model is built again without a warm-up: the first requests may take longer%s. State in"
        " buffers does not need that.",
        config.name,
        join_names(changed),
        ", and calls that need another graph run eagerly"
        if torch_compile.requested(config)
        else "",
    )


def log_progress(model: str, items: Iterator[Item]) -> Iterator[Item]:
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


def _run_sample(engine: Engine, call: _Call, sample: Item) -> tuple[Item, BackendError] | None:
    """Call the engine with a sample until a request of this kind costs no first call.

    Return a request that failed, and its error.

    Raises:
        NoServerError: the model calls another model.
    """
    before = side_effects.copy_tensors(sample)
    config = engine.config
    items = example_inputs.requests(config, sample)
    for number in range(1, _REPEATS * (2 if config.states else 1) + 1):
        results: list[dict[str, Value]] = []
        for item, outcome in zip(items, call(items), strict=True):
            if isinstance(outcome, NoServerError):
                raise outcome
            if isinstance(outcome, BackendError):
                return item, outcome
            results.append(outcome)
        if number == _REPEATS:
            engine.side_effects.compare(before, sample)
        if number >= _REPEATS and config.states:
            # Later steps of a sequence, whose states may have grown.
            steps = zip(items, results, strict=True)
            items = [state_store.next_item(config, *step) for step in steps]
    return None


def _failure(model: str, item: Item, error: BackendError) -> WarmupError:
    return WarmupError(
        model,
        f"the warm-up with {_shapes(item)} failed: {error}",
        cure="Correct the model or its config. If it cannot take made-up values (ones, random"
        ' numbers below 1, the string "text"), put valid ones beside it'
        f' ({example_inputs.NAME}.safetensors), or set the parameter WARMUP to "false".',
    )


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
        and not engine.runner.captures
        and not torch_compile.required(engine.config)
        # Compilation by a TorchServe handler cannot be disabled once requests come.
        and not (engine.kind is ArtifactType.TORCHSERVE and torch_compile.requested(engine.config))
        # Other instances read the same memory: the warm-up must show that the model does not write.
        and not gpu_sharing.requested(engine.config)
        and not example_inputs.find(engine.config, engine.artifact)
    )


def batches(engine: Engine, row_counts: Sequence[int | None] = ()) -> Iterator[Item]:
    """Yield an item for each kind of batch whose first call may be slow; see `run`."""
    config = engine.config
    example = _example(engine)
    # Hooks may not take smaller examples, such as a part of the bytes of a file.
    fixed = example and engine.hooks
    varies = not fixed and any(
        -1 in spec.dims for spec in config.inputs if spec.origin is not Origin.STATE
    )
    for rows, shrunk, without in itertools.product(
        row_counts or _row_counts(engine),
        (False, True) if varies else (False,),
        engine.grouping.patterns,
    ):
        item = example_inputs.item(config, rows, shrunk=shrunk, without=without, example=example)
        if item or rows is None:  # an item without inputs has no row count
            yield item


def _example(engine: Engine) -> Item:
    """Return the example values that fit the config."""
    config = engine.config
    example = example_inputs.find(config, engine.artifact) or {}
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
    if engine.runner.rows.buckets:
        return engine.runner.rows.buckets[::-1]
    if engine.runner.compiles:
        # A graph for all row counts may have guards that only some row counts pass.
        every = largest if engine.config.options.static_shapes else min(largest, _EVERY_ROW_COUNT)
        counts = {*range(1, every + 1), *batch_buckets.powers_of_two(largest)}
        return sorted(counts, reverse=True)
    return sorted({largest, max(1, largest - 1), 1}, reverse=True)
