"""The warm-up: calls with sample batches before READY, so that no request pays for first calls."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from torch import Tensor

from torch_py_backend.config import pbtxt
from torch_py_backend.config.model_config import ModelConfig, Origin
from torch_py_backend.engine import compilation, model_state, sharing, streams
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import (
    BackendError,
    CallError,
    ConfigError,
    ForwardError,
    InputError,
    LoadError,
    join_names,
)
from torch_py_backend.loading import example_inputs
from torch_py_backend.pipeline import differences
from torch_py_backend.pipeline.batches import powers_of_two
from torch_py_backend.values import Item, Outcome, Value

log = logging.getLogger(__name__)

# The most calls with a sample: TorchScript's profiling executor optimizes at the third call of a
# shape, and CUDA graphs are recorded at the second.
_REPEATS = 3
# Errors that made-up values of the inputs may cause.
_OF_VALUES = ForwardError | InputError

_Call: TypeAlias = "Callable[[Sequence[Item]], Sequence[Outcome]]"


def run(
    engine: Engine, *, serving: bool = False, row_counts: Sequence[int | None] = ()
) -> list[str]:
    """Call the engine with a sample of every kind of batch.

    Return the attributes of the model that have changed and cannot be put back; see `ModelState`.

    `serving`: the model is served next; then a made-up sample that fails is a warning. `row_counts`
    are the only ones that are going to be called; empty: any.

    Raises:
        LoadError: forward() failed, its result contradicts the config, or the rows of a batch,
            which auto-completion has chosen, depend on each other.
    """
    call = streams.trial(engine) if engine.config.decoupled else engine.run
    compiles = "; torch.compile may take minutes" if engine.compiles else ""
    log.info("the warm-up begins%s.", compiles)
    first: LoadError | None = None
    state = model_state.ModelState(engine.loaded.owner)
    with engine.preparing():
        try:
            for sample in batches(engine, row_counts):
                error = _run_sample(engine, call, sample)
                if error is None:
                    continue
                failure = error if isinstance(error, LoadError) else _failure(sample, error)
                failure.traceback = error.traceback
                if not (serving and isinstance(error, _OF_VALUES) and _may_fail(engine)):
                    if error.reported:
                        log.error("%s\n%s", error, error.traceback)
                    raise failure
                first = first or failure
            if not row_counts:
                counts = [count for count in _row_counts(engine) if count and count > 1]
                check_rows(engine.config, call, example(engine), min(counts, default=0))
        except CallError as error:
            log.warning("the warm-up is skipped: the model calls another model. %s", error)
        changed = state.put_back()
    if first is not None:
        consequence = "the first requests may take longer."
        if engine.compiles:
            consequence = "calls that need another graph run eagerly."
        log.warning("%s The model is served anyway; %s\n%s", first, consequence, first.traceback)
    return changed


def warn_of_changes(config: ModelConfig, changed: Sequence[str]) -> None:
    """Log a warning that the model is built again, because the warm-up has changed attributes.

    Raises:
        ConfigError: other instances share the weights of the first model.
    """
    if sharing.requested(config):
        raise sharing.not_shared_error(f"forward() changes {join_names(changed)} of the model")
    log.warning(
        "the warm-up has changed %s of the model, and answers may depend on that. The model is"
        " built again without a warm-up: the first requests may take longer. State in buffers"
        " does not need that.",
        join_names(changed),
    )


def _run_sample(engine: Engine, call: _Call, sample: Item) -> BackendError | None:
    """Call the engine with a sample until a request of this kind costs no first call.

    Return the error of a request that failed.

    Raises:
        CallError: the model calls another model.
    """
    config = engine.config
    items = example_inputs.requests(config, sample)
    compiled = engine.compiles and engine.device.type == "cpu" and not config.states
    optimized = engine.compiles or engine.loaded.signature.torchscript
    repeats = _REPEATS if optimized else 1
    for number in range(1, repeats * (2 if config.states else 1) + 1):
        graphs = compilation.graph_count() if compiled else 0  # it imports the compiler
        results: list[dict[str, Value]] = []
        for outcome in call(copy.deepcopy(items)):  # forward() may write into them
            if isinstance(outcome, CallError):
                raise outcome
            if isinstance(outcome, BackendError):
                return outcome
            results.append(outcome)
        settled = compiled and compilation.graph_count() == graphs
        if settled:
            break
        if number >= repeats and config.states:
            # Later steps of a sequence, whose states may have grown.
            items = [
                item | {state.input: result[state.output] for state in config.states}
                for item, result in zip(items, results, strict=True)
            ]
    return None


def _failure(sample: Item, error: BackendError) -> LoadError:
    cure = ""  # the error has its own
    if isinstance(error, _OF_VALUES):
        cure = (
            "Correct the model or its config. If it cannot take made-up values (ones, random"
            ' numbers below 1, the string "text"), put valid ones beside it'
            f' ({example_inputs.NAME}.safetensors), or set the parameter WARMUP to "false".'
        )
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in sample.items())
    return LoadError(f"the warm-up with {shapes} failed: {error}", cure=cure)


def _may_fail(engine: Engine) -> bool:
    """Return whether the model is served although a sample failed.

    It is if made-up values can be the cause, and if the config does not depend on a successful
    warm-up.
    """
    return (
        engine.config.options.warmup is None
        # Other instances read the same memory: the warm-up must show that the model does not write.
        and not sharing.requested(engine.config)
        and not example_inputs.find(engine.config, engine.loaded.artifact)
    )


def batches(engine: Engine, row_counts: Sequence[int | None] = ()) -> Iterator[Item]:
    """Yield an item for each kind of batch whose first call may be slow; see `run`."""
    config = engine.config
    values = example(engine)
    # Hooks may not take smaller examples, such as a part of the bytes of a file.
    fixed = values and engine.hooks
    varies = not fixed and any(
        -1 in spec.dims for spec in config.inputs if spec.origin is not Origin.STATE
    )
    sizes = (False, True) if varies else (False,)
    for rows in row_counts or _row_counts(engine):
        for shrunk, without in itertools.product(sizes, engine.inputs.patterns):
            item = example_inputs.item(config, rows, shrunk=shrunk, without=without, example=values)
            if item or rows is None:  # an item without inputs has no row count
                yield item


def example(engine: Engine) -> Item:
    """Return the example values that fit the config."""
    config = engine.config
    example = dict(example_inputs.find(config, engine.loaded.artifact) or {})
    for spec in config.inputs:
        value = example.get(spec.name)
        if value is not None and not example_inputs.fits(config, spec, value):
            log.warning(
                "the example of input '%s' is %s %s, and config.pbtxt has %s; the"
                " warm-up uses made-up values instead.",
                spec.name,
                str(value.dtype).removeprefix("torch."),
                list(value.shape),
                spec,
            )
            del example[spec.name]
    return example


def _row_counts(engine: Engine) -> Sequence[int | None]:
    """Return the row counts whose first call may be slow."""
    largest = engine.config.max_batch_size
    if largest == 0:
        return [None]
    if engine.rows.buckets:
        return engine.rows.buckets[::-1]
    if engine.compiles and engine.config.options.static_shapes:
        return range(largest, 0, -1)
    counts = {largest, min(largest, 2), 1}
    if engine.compiles:
        # Guards of graphs compare the rows with powers of two, or ask whether they are even.
        counts.update(powers_of_two(largest), [min(largest, 3)])
    elif engine.loaded.signature.torchscript:
        # TorchScript compiles for two exact shapes, then for others of the same size.
        counts = {largest, max(1, largest - 1), 1}
    return sorted(counts, reverse=True)


def check_rows(
    config: ModelConfig,
    call: Callable[[Sequence[Item]], Sequence[Outcome]],
    example: Item,
    rows: int,
) -> None:
    """Compare rows that are computed alone with those in a batch, which Triton forms of requests.

    If they differ, that is an error where auto-completion has chosen the batch, else a warning.
    Outputs that are not floating point are not compared, nor random ones.

    `example` has valid values of inputs; others are made up. Below two rows nothing is compared.

    Raises:
        ConfigError: rows depend on each other, and auto-completion has chosen the batch.
    """
    completed = rows > 1 and pbtxt.leaves_out_batch_size(config.folder)
    forms_batches = rows > 1 and (completed or config.dynamic_batching)
    if not forms_batches or config.sequencing or config.decoupled or config.concatenates:
        return
    item = {
        name: example_inputs.distinct_rows(value) if isinstance(value, Tensor) else value
        for name, value in example_inputs.item(config, rows, example=example).items()
    }

    def outputs(begin: int, end: int) -> dict[str, Tensor]:
        """Return the first and the last of some rows: all may take much memory."""
        # Copied, because forward() may write into them.
        part = {name: copy.deepcopy(value[begin:end]) for name, value in item.items()}
        (outcome,) = call([part])
        if isinstance(outcome, BackendError):
            return {}
        ends = sorted({0, end - begin - 1})
        return {
            name: value[ends].cpu()
            for name, value in outcome.items()
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape[:1] == (end - begin,)
        }

    batch, again = outputs(0, rows), outputs(0, rows)
    for name in list(batch):
        if name not in again or differences.differs(again[name], batch[name]):
            del batch[name]
    dependent = differences.dependent_output(batch, outputs(0, 1), outputs(rows - 1, rows))
    if dependent is None:
        return
    other = f"max_batch_size: {config.max_batch_size}" if completed else "remove dynamic_batching"
    problem = ConfigError(
        f"output '{dependent}' for a row alone is another than for that row in a batch of {rows}",
        expected="rows that do not depend on each other: Triton batches those of all clients",
        cure="Write the inputs and outputs with all their dims, and max_batch_size: 0, into"
        f" config.pbtxt, or {other}.",
    )
    if completed:
        raise problem
    log.warning("%s", problem)
