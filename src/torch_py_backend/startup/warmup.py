"""The warm-up: calls with sample batches before READY, so that no request pays for first calls."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.batching import differences
from torch_py_backend.batching.gather_scatter import Item, Outcome, Value
from torch_py_backend.compile import batch_buckets, torch_compile
from torch_py_backend.config import pbtxt
from torch_py_backend.config.model_config import ModelConfig, Origin
from torch_py_backend.engine import side_effects
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import (
    BackendError,
    ConfigError,
    ForwardError,
    HookError,
    InputError,
    LoadError,
    NoServerError,
    OutputError,
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
# Rows depend on each other if more than this share of a row's values has an error above this one.
# Kernels for other row counts, reduced precision and quantization make smaller errors in most
# values; a few, as in a mask or an order, may change completely.
_MAX_ROW_ERROR = _MAX_ROW_SHARE = 0.1
# Seconds between two reports of progress.
_REPORT_S = 10.0

_Call: TypeAlias = "Callable[[Sequence[Item]], Sequence[Outcome]]"


def run(engine: Engine, *, serving: bool = False, row_counts: Sequence[int | None] = ()) -> None:
    """Call the engine with a sample of every kind of batch.

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
                _check_rows(engine, call)
        except NoServerError as error:
            log.warning(
                "model '%s': the warm-up is skipped: the model calls another model. %s",
                model,
                error,
            )
    if first is not None:
        consequence = "the first requests may take longer."
        if engine.runner.compiles:
            consequence = "calls that need another graph run eagerly."
        log.warning("%s The model is served anyway; %s\n%s", first, consequence, first.traceback)


def _check_rows(engine: Engine, call: _Call) -> None:
    """Compare rows that are computed alone with those in a batch, if Triton batches all clients'.

    The first and the last row are compared: the first one of a recurrent model, or behind a causal
    mask, does not depend on the others. Random outputs are not compared.

    Raises:
        ConfigError: they differ, and auto-completion has chosen the batch.
    """
    config = engine.config
    completed = config.max_batch_size > 1 and pbtxt.leaves_out_batch_size(config.folder)
    rows = min((count for count in _row_counts(engine) if count and count > 1), default=0)
    if (
        not (completed or config.dynamic_batching)
        or config.sequencing is not None
        or config.decoupled
        or config.concatenates
        or not rows
    ):
        return
    example = _fitting_example(config, example_inputs.find(config, engine.artifact) or {})
    item = _distinct_rows(config, example_inputs.item(config, rows, example=example))

    def outputs(begin: int, end: int) -> dict[str, Tensor]:
        """Return the first and the last row of outputs that are floating point.

        All rows may take much memory. There are none if the call fails, or returns other rows.
        """
        part = {
            name: value[begin:end].clone() if isinstance(value, Tensor) else value[begin:end].copy()
            for name, value in item.items()
        }
        (outcome,) = call([part])
        if isinstance(outcome, BackendError):
            return {}
        return {
            name: value[[0, -1]].cpu()
            for name, value in outcome.items()
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape[:1] == (end - begin,)
        }

    together, again = outputs(0, rows), outputs(0, rows)
    first, last = outputs(0, 1), outputs(rows - 1, rows)
    for name, value in together.items():
        if any(name not in part or part[name].shape != value.shape for part in (first, last)):
            continue  # such as one padded to the longest row of a batch
        if _error(config, name, again.get(name, value), value) > differences.tolerance(value):
            continue
        alone = torch.stack([first[name][0], last[name][-1]])
        shares = differences.shares_beyond(_MAX_ROW_ERROR, alone, value)
        if max(shares, default=0.0) <= _MAX_ROW_SHARE:
            continue
        error = _error(config, name, alone, value)
        dependence = ConfigError(
            config.name,
            f"output '{name}' for a row alone differs by {error:.2g} from that row in a batch of"
            f" {rows}, and the config has max_batch_size {config.max_batch_size}"
            + " from auto-completion"
            * completed,
            expected="rows that do not depend on each other: Triton batches those of all clients",
            cure="Write the inputs and outputs with all their dims, and max_batch_size: 0, into"
            " config.pbtxt"
            + (", or the max_batch_size." if completed else ", or remove dynamic_batching."),
        )
        if completed:
            raise dependence
        log.warning("%s", dependence)
        return


def _distinct_rows(config: ModelConfig, item: Item) -> Item:
    """Return an item whose rows differ: an example may have one row, which is repeated."""
    for spec in config.inputs:
        value = item.get(spec.name)
        # A row of one value may be an argument that takes one number for the whole batch.
        if (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value[0].numel() > 1
            and all(torch.equal(value[0], row) for row in value[1:])
        ):
            factors = torch.linspace(1.0, 0.5, len(value)).to(value.dtype)
            item[spec.name] = value * factors.reshape(-1, *[1] * (value.ndim - 1))
    return item


def _error(config: ModelConfig, name: str, actual: Tensor, expected: Tensor) -> float:
    try:
        return differences.difference(config.name, name, actual, expected)
    except OutputError:  # infinities or NaN in one of them
        return math.inf


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
    example = _fitting_example(config, example_inputs.find(config, engine.artifact) or {})
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


def _fitting_example(config: ModelConfig, example: Item) -> Item:
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
    if engine.runner.rows.buckets:
        return engine.runner.rows.buckets[::-1]
    if engine.runner.compiles:
        # A graph for all row counts may have guards that only some row counts pass.
        every = largest if engine.config.options.static_shapes else min(largest, _EVERY_ROW_COUNT)
        counts = {*range(1, every + 1), *batch_buckets.powers_of_two(largest)}
        return sorted(counts, reverse=True)
    return sorted({largest, max(1, largest - 1), 1}, reverse=True)
