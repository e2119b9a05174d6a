"""What a model takes and gives, told from the model: names, types, dims, batch size."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_py_backend import (
    artifacts,
    config,
    dtypes,
    examples,
    loaders,
    outputs,
    programs,
    results,
    samples,
    sequences,
    streams,
)
from torch_py_backend.artifacts import Artifact, Kind
from torch_py_backend.batching import Item, Value
from torch_py_backend.binding import bind_inputs, ordinal
from torch_py_backend.config import ModelConfig, TensorSpec
from torch_py_backend.errors import (
    ConfigError,
    ForwardError,
    LoadError,
    SourceError,
)
from torch_py_backend.intake import Intake
from torch_py_backend.loaders import Loaded

log = logging.getLogger(__name__)

# Shapes and types without values: a forward() on it computes nothing.
_META = torch.device("meta")
# What a model gets that takes any number of rows, and says no number itself.
_MAX_BATCH_SIZE = 8
# Beyond it, a number that a program states is no measure of what fits, but stands for "any".
_LARGEST = 4096


@dataclass(frozen=True, slots=True)
class Schema:
    """A model's tensors, without the batch dimension where max_batch_size is above 0.

    Attributes:
        kept: names of inputs and outputs that are the states and controls of sequences.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    kept: frozenset[str] = frozenset()
    decoupled: bool = False


def describe(arguments: Mapping[str, str]) -> dict[str, Any]:
    """The schema of a model folder, as JSON.

    Args:
        arguments: what Triton passes to `initialize`; inputs and outputs may be missing.

    Raises:
        LoadError: the model cannot be loaded, or nothing tells its schema.
    """
    settings = config.parse(arguments, complete=False)
    if "model_transaction_policy" not in json.loads(arguments["model_config"]):
        # Undecided: a model that makes streams is loaded as one.
        settings = dataclasses.replace(settings, decoupled=True)
    found = of_model(settings)
    return {
        "input": [_as_json(spec) for spec in found.inputs],
        "output": [_as_json(spec) for spec in found.outputs],
        "max_batch_size": found.max_batch_size,
        "kept": sorted(found.kept),
        "decoupled": found.decoupled,
    }


def _as_json(spec: TensorSpec) -> dict[str, Any]:
    entry = {"name": spec.name, "data_type": spec.dtype.config, "dims": list(spec.dims)}
    # One value a row: Triton wants a dimension, the model must not see it.
    return entry if spec.dims else entry | {"dims": [1], "reshape": {"shape": []}}


def of_model(settings: ModelConfig) -> Schema:
    """The schema of the artifact in a model's version folder."""
    artifact = artifacts.find(settings)
    if artifact.kind is Kind.EXPORTED:
        return _of_program(settings, programs.describe_exported(settings, artifact.path))
    if artifact.kind is not Kind.AOTI:  # compiled code reads memory, which meta tensors lack
        try:
            return _of_example(settings, artifact, _META)
        except LoadError:
            raise
        except Exception as error:  # what depends on values, or on the device
            log.debug("model '%s' does not run on meta tensors: %s", settings.name, error)
    return _of_example(settings, artifact, torch.device("cpu"))


# --- exported programs -------------------------------------------------------------------------


def _of_program(settings: ModelConfig, described: programs.Described) -> Schema:
    """Types and sizes stand in the program; a size that is not fixed is -1."""
    sizes = [dims[:1] for _, _, dims in (*described.inputs, *described.outputs)]
    # A fixed size of dimension 0 may be a batch, or anything else.
    batched = bool(sizes) and all(size == (-1,) for size in sizes)
    return Schema(
        tuple(_spec(settings, *one, batched=batched) for one in described.inputs),
        tuple(_spec(settings, *one, batched=batched) for one in described.outputs),
        _batch_size(described.rows.most) if batched else 0,
        frozenset(
            (
                *_among([name for name, *_ in described.inputs], _kept_inputs(settings)),
                *_among(
                    [name for name, *_ in described.outputs],
                    [state.output for state in settings.states],
                ),
            )
        ),
    )


def _kept_inputs(settings: ModelConfig) -> list[str]:
    """What the config says that no request brings."""
    controls = settings.sequencing.controls if settings.sequencing is not None else ()
    return [*(state.input for state in settings.states), *(one.name for one in controls)]


def _among(told: Sequence[str], wanted: Sequence[str]) -> Iterator[str]:
    """What a program calls those that a config calls by name or number."""
    for name in wanted:
        number = ordinal(name)
        if name in told:
            yield name
        elif number is not None and number < len(told):
            yield told[number]


def _batch_size(most: int | None) -> int:
    return _MAX_BATCH_SIZE if most is None or most > _LARGEST else most


def _spec(
    settings: ModelConfig, name: str, dtype: torch.dtype, dims: Sequence[int], *, batched: bool
) -> TensorSpec:
    return TensorSpec(
        name, _dtype(settings, name, dtype), tuple(dims[1:] if batched else dims or (1,))
    )


def _dtype(settings: ModelConfig, name: str, dtype: torch.dtype) -> dtypes.DType:
    try:
        return dtypes.from_torch(str(dtype).removeprefix("torch."))
    except KeyError:
        raise SourceError(
            settings.name,
            f"tensor '{name}' is {str(dtype).removeprefix('torch.')}, which no request can carry",
            expected=", ".join(one.torch for one in dtypes.TABLE if one.torch),
        ) from None


# --- by example ------------------------------------------------------------------------------


def _example(settings: ModelConfig, artifact: Artifact) -> Item:
    found = examples.find(settings, artifact)
    if found is None:
        raise ConfigError(
            settings.name,
            f"config.pbtxt lists no inputs or no outputs, and {artifact.kind.value} does not tell"
            " its shapes",
            expected=f"{examples.NAME}.safetensors in the version folder, or a function"
            f" {examples.NAME}() in model.py that returns a dict of tensors by input name",
            cure="Add one of them, or write the inputs and outputs into config.pbtxt.",
        )
    return found


def _of_example(settings: ModelConfig, artifact: Artifact, device: torch.device) -> Schema:
    """Run once with the example and once with twice their rows: what grows is the batch.

    Raises:
        ForwardError: forward() fails with the example; on meta tensors, with twice their rows too.
    """
    loaded = loaders.load(artifact, settings, device)
    example = _begun(settings, loaded, _example(settings, artifact))
    whole = dataclasses.replace(
        settings,
        max_batch_size=0,
        inputs=tuple(_example_spec(settings, name, value) for name, value in example.items()),
    )
    once = _run(whole, loaded, example, device)
    rows = {value.shape[:1] for value in example.values()}
    if len(rows) == 1 and rows != {()}:
        (size,) = rows
        twice = _run_doubled(whole, loaded, example, device)
        if twice is not None and _grew(once.values, twice.values, size[0]):
            return _schema(settings, loaded, example, once, batched=True)
    return _schema(settings, loaded, example, once, batched=False)


def _begun(settings: ModelConfig, loaded: Loaded, example: Item) -> Item:
    """The example with what a request does not bring: first states, and controls."""
    if settings.sequencing is None:
        return example
    rows = {value.shape[0] for value in example.values() if value.ndim}
    count = rows.pop() if settings.max_batch_size and len(rows) == 1 else None
    specs = tuple(_example_spec(settings, name, value) for name, value in example.items())
    config = sequences.bound(dataclasses.replace(settings, inputs=specs), loaded.signature)
    return {**sequences.initial(settings, count), **samples.item(config, count, example=example)}


def _example_spec(settings: ModelConfig, name: str, value: Value) -> TensorSpec:
    return TensorSpec(name, _kind(settings, name, value), tuple(value.shape))


def _kind(settings: ModelConfig, name: str, value: Value) -> dtypes.DType:
    if isinstance(value, Tensor):
        return _dtype(settings, name, value.dtype)
    return dtypes.from_triton("BYTES")


class _Made(NamedTuple):
    """What a call gave.

    Attributes:
        values: every output by name, as arrays and tensors.
        kept: those that are states of a sequence.
    """

    values: Mapping[str, Value]
    kept: frozenset[str]


def _run(settings: ModelConfig, loaded: Loaded, example: Item, device: torch.device) -> _Made:
    intake = Intake(settings, loaded.signature)
    (group,) = intake.group([(0, example)])
    columns = [example[name] for name in group.inputs.names]
    try:
        passed = intake.convert(group.inputs, columns)  # numbers need values
        with torch.inference_mode(), device:
            passed = [one.to(device) if isinstance(one, Tensor) else one for one in passed]
            result = streams.first(
                settings.name, loaded.step, group.inputs.call(loaded.module, passed)
            )
    except Exception as error:  # the model's own code runs here
        raise ForwardError(settings.name, error) from error
    names = results.names(result)
    parts = results.bind_outputs(settings.name, names, result)(result)
    values = {
        name: outputs.plain(settings.name, name, part)
        for name, part in zip(names, parts, strict=True)
    }
    wanted = [state.output for state in settings.states]
    states = results.bind_outputs(settings.name, wanted, result)(result) if wanted else ()
    places = {id(part): name for name, part in zip(names, parts, strict=True)}
    return _Made(values, frozenset(places[id(part)] for part in states))


def _run_doubled(
    settings: ModelConfig, loaded: Loaded, example: Item, device: torch.device
) -> _Made | None:
    doubled: Item = {
        name: torch.cat([value, value])
        if isinstance(value, Tensor)
        else np.concatenate([value, value])
        for name, value in example.items()
    }
    try:
        return _run(settings, loaded, doubled, device)
    except ForwardError:
        if device is _META:
            raise
        return None  # it takes the rows of the example and no others


def _grew(once: Mapping[str, Value], twice: Mapping[str, Value], rows: int) -> bool:
    return once.keys() == twice.keys() and all(
        value.ndim > 0
        and value.shape[0] == rows
        and twice[name].shape == (2 * rows, *value.shape[1:])
        for name, value in once.items()
    )


def _schema(
    settings: ModelConfig,
    loaded: Loaded,
    example: Item,
    made: _Made,
    *,
    batched: bool,
) -> Schema:
    return Schema(
        tuple(_tensor(settings, name, value, batched=batched) for name, value in example.items()),
        tuple(
            _tensor(settings, name, value, batched=batched) for name, value in made.values.items()
        ),
        _batch_size(_most_rows(settings, loaded, example)) if batched else 0,
        made.kept.union(_kept_inputs(settings)),
        decoupled=loaded.streams,
    )


def _most_rows(settings: ModelConfig, loaded: Loaded, examples: Item) -> int | None:
    if loaded.kind is not Kind.AOTI:
        return loaded.rows.most
    inputs = bind_inputs(settings.name, list(examples), loaded.signature)
    columns = [value for name in inputs.names if isinstance(value := examples[name], Tensor)]
    return programs.most_rows(lambda leaves: inputs.call(loaded.module, leaves), columns)


def _tensor(settings: ModelConfig, name: str, value: Value, *, batched: bool) -> TensorSpec:
    dims = tuple(value.shape[1:] if batched else value.shape)
    # Without a batch there is no reshape to nothing: a single value is a list of one.
    kind = _kind(settings, name, value)
    return TensorSpec(name, kind, dims if batched else dims or (1,))
