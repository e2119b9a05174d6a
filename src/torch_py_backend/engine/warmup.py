"""The warm-up: calls with sample batches before READY, so that no request pays for first calls."""

from __future__ import annotations

import base64
import copy
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from torch import Tensor

from torch_py_backend.config import pbtxt
from torch_py_backend.config.model_config import ModelConfig, Origin
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.engine import model_state, runtime, sharing, streams
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
from torch_py_backend.pipeline.batches import powers_of_two
from torch_py_backend.pipeline.differences import differs
from torch_py_backend.values import Item, Outcome, Value

log = logging.getLogger(__name__)

# TorchScript's profiling executor optimizes a shape's third call; CUDA graphs record the second.
_REPEATS = 3
# The most values of an input in `request`.
_MOST_VALUES = 64
_MOST_BYTES = 1 << 14
# Errors that made-up values of the inputs may cause.
_OF_VALUES = ForwardError | InputError
_Call: TypeAlias = "Callable[[Sequence[Item]], Sequence[Outcome]]"


def run(
    engine: Engine,
    *,
    serving: bool = False,
    row_counts: Sequence[int | None] = (),
) -> list[str]:
    """Call the engine with a sample of every kind of batch; return what `ModelState` returns.

    LoadError if a call fails; if the model is `serving` next, a made-up sample that fails is a
    warning, as are other sizes of an example always. `row_counts`: the only ones run; empty: any.
    """
    config = engine.config
    call = streams.trial(engine) if config.decoupled else engine.run
    log.info("the warm-up begins%s.", "; compilation may take minutes" if engine.compiles else "")
    # Of shared weights, the warm-up must show that the model does not write to them.
    lenient = config.options.warmup is None and not sharing.requested(config)
    lenient = lenient and (serving or bool(engine.example))
    first: LoadError | None = None
    state = model_state.ModelState(engine.loaded.owner)
    with engine.preparing():
        for sample, made_up in batches(engine, row_counts):
            error = _run_sample(engine, call, sample)
            if error is None:
                continue
            if isinstance(error, CallError):
                log.warning("the warm-up is skipped: the model calls another model. %s", error)
                break
            failure = error if isinstance(error, LoadError) else _failure(sample, error)
            failure.traceback = error.traceback
            if not (lenient and made_up and isinstance(error, _OF_VALUES)):
                if error.reported:
                    log.error("%s\n%s", error, error.traceback)
                raise failure
            first = first or failure
        if not row_counts:
            counts = [count for count in _row_counts(engine) if count and count > 1]
            check_rows(config, call, engine.example, min(counts, default=0))
        changed = state.changed()
        if changed and sharing.requested(config):
            raise sharing.not_shared_error(f"forward() changes {join_names(changed)} of the model")
        changed = state.put_back(changed)
    if first is not None:
        log.warning(
            "%s The model is served anyway; its first requests may take longer, and run eagerly"
            " where a compiled graph is missing.\n%s",
            first,
            first.traceback,
        )
    return changed


def _run_sample(
    engine: Engine,
    call: _Call,
    sample: Item,
) -> BackendError | None:
    """Call the engine until requests like the sample cost no first call; return their error."""
    states = engine.config.states
    items = example_inputs.requests(engine.config, sample)
    repeats = _REPEATS if engine.compiles or engine.loaded.signature.torchscript else 1
    for number in range(1, repeats * (2 if states else 1) + 1):
        results = []
        for outcome in call(copy.deepcopy(items)):  # forward() may write into them
            if isinstance(outcome, BackendError):
                return outcome
            results.append(outcome)
        if states and number >= repeats:  # later steps of a sequence, whose states may have grown
            items = [
                item | {state.input: result[state.output] for state in states}
                for item, result in zip(items, results, strict=True)
            ]
    return None


def _failure(sample: Item, error: BackendError) -> LoadError:
    cure = ""  # the error has its own
    if isinstance(error, _OF_VALUES):
        cure = (
            "Correct the model or its config. If it cannot take made-up values, add valid ones"
            f' ({example_inputs.NAME}.safetensors), or set the parameter WARMUP to "false".'
        )
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in sample.items())
    return LoadError(f"the warm-up with {shapes} failed: {error}", cure=cure)


def batches(
    engine: Engine,
    row_counts: Sequence[int | None] = (),
) -> Iterator[tuple[Item, bool]]:
    """Yield an item for each kind of batch whose first call may be slow, and if it is made up."""
    config = engine.config
    # Hooks may not take smaller examples, such as a part of the bytes of a file.
    varies = not (engine.example and engine.hooks) and any(
        -1 in spec.dims for spec in config.inputs if spec.origin is not Origin.STATE
    )
    for rows in (config.max_batch_size and row_counts) or _row_counts(engine):
        for shrunk, without in itertools.product(range(1 + varies), engine.inputs.patterns):
            item = example_inputs.item(
                config, rows, shrunk=bool(shrunk), without=without, example=engine.example
            )
            if item or rows is None:  # an item without inputs has no row count
                yield item, bool(shrunk) or not engine.example


def sample(engine: Engine, rows: int) -> Item:
    """Return a batch of this many rows: of the model's example, else made up."""
    return next(batches(engine, [rows]), ({}, True))[0]


def request(engine: Engine) -> list[JsonObject]:
    """Return the inputs of a request of one row, in the JSON of Triton's HTTP endpoint.

    The data of a large input is a note on how many values, or bytes, it has.
    """
    values, inputs = sample(engine, 1), []
    for spec in engine.config.inputs:
        if spec.origin is not Origin.CLIENT:
            continue
        value = values[spec.name]
        # Triton removes the dimension that one value for each row has.
        shape = [*value.shape, *[1] * spec.reshaped]
        data = [*map(_plain, value.reshape(-1)[: _MOST_VALUES + 1].tolist())]
        if len(data) > _MOST_VALUES:
            data = [f"{math.prod(value.shape)} values"]
        inputs.append(
            {"name": spec.name, "datatype": spec.dtype.triton, "shape": shape, "data": data}
        )
    return inputs


def _plain(element: object) -> object:
    """Return an element as JSON: numbers are rounded, bytes of an image or the like "base64"."""
    if isinstance(element, bytes):
        if len(element) > _MOST_BYTES:
            return f"{len(element)} bytes"
        try:
            return element.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(element).decode()}
    if isinstance(element, float):
        return round(element, 4) if math.isfinite(element) else 0.0
    return element


def outputs(engine: Engine, item: Item) -> list[dict[str, Value]]:
    """Return the outputs of the requests of an item; raise the error of one that fails."""
    results = []
    with runtime.mode(engine.config.options):
        for outcome in engine.run(example_inputs.requests(engine.config, item)):
            if isinstance(outcome, BackendError):
                raise outcome
            results.append(outcome)
    return results


def _row_counts(engine: Engine) -> Sequence[int | None]:
    """Return the row counts whose first call may be slow."""
    largest = engine.config.max_batch_size
    if largest == 0:
        return [None]
    if engine.rows.buckets:
        return engine.rows.buckets[::-1]
    if engine.compiles and engine.config.options.static_shapes:
        return range(largest, 0, -1)
    # TorchScript compiles for two exact shapes, then for others of the same size.
    counts = {largest, min(largest, 2), 1}
    if engine.compiles:
        # Guards of graphs compare the rows with powers of two, or ask whether they are even.
        counts.update(powers_of_two(largest), [min(largest, 3)])
    return sorted(counts, reverse=True)


def check_rows(
    config: ModelConfig,
    call: _Call,
    example: Item,
    rows: int,
) -> None:
    """Compare the first and the last row of a batch with the same rows alone.

    Triton forms batches of requests. Two rows, because the first one of a recurrent model, or
    behind a causal mask, does not depend on the others. Outputs of floating point are compared that
    are not random, and have the same sizes alone, unlike those that are padded to the longest row.
    If they differ, it is a warning, or a ConfigError where auto-completion has chosen the batch.
    """
    if rows < 2 or config.sequencing or config.decoupled or config.concatenates:  # noqa: PLR2004
        return
    completed = pbtxt.leaves_out_batch_size(config.folder)
    if not completed and not config.dynamic_batching:
        return
    item = example_inputs.item(config, rows, example=example)
    item = {name: example_inputs.distinct_rows(value) for name, value in item.items()}

    def ends(begin: int, end: int) -> dict[str, Tensor]:
        """Return the first and the last row of the outputs: all of them may take much memory."""
        # Copied, because forward() may write into them.
        (outcome,) = call([{name: copy.deepcopy(of[begin:end]) for name, of in item.items()}])
        values = {} if isinstance(outcome, BackendError) else outcome
        return {
            name: value[[0, -1]].cpu()
            for name, value in values.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }

    batch = ends(0, rows)
    again = ends(0, rows)
    first = ends(0, 1)
    last = ends(rows - 1, rows)
    for name in batch.keys() & again.keys() & first.keys() & last.keys():
        value = batch[name]
        alone = (first[name][0], last[name][0])
        if differs(again[name], value) or any(row.shape != value.shape[1:] for row in alone):
            continue
        if any(map(differs, alone, value)):
            problem = ConfigError(
                f"output '{name}' for a row alone is another than for it in a batch of {rows}",
                expected="rows that do not depend on each other: Triton batches those of all"
                " clients",
                cure="Write the inputs and outputs with all their dims, and max_batch_size: 0, into"
                f" config.pbtxt, or max_batch_size: {config.max_batch_size} without"
                " dynamic_batching.",
            )
            if completed:
                raise problem
            log.warning("%s", problem)
