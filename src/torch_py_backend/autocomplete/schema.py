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

from torch_py_backend.artifacts import discovery
from torch_py_backend.artifacts.discovery import Artifact, Kind
from torch_py_backend.batching import output_extraction, runtime
from torch_py_backend.batching.gather_scatter import Item, Value
from torch_py_backend.batching.grouping import Intake
from torch_py_backend.config import dtypes, model_config
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.errors import (
    BackendError,
    ConfigError,
    ForwardError,
    InputError,
    LoadError,
    SourceError,
    shown,
)
from torch_py_backend.hooks import user_hooks
from torch_py_backend.hooks.hooked_pipeline import Stages
from torch_py_backend.hooks.user_hooks import Hooks
from torch_py_backend.loading import (
    aotinductor,
    example_inputs,
    exported_program,
    registry,
    sample_inputs,
    size_probing,
)
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.sequences import initial_states, state_store
from torch_py_backend.signature import results
from torch_py_backend.signature.binding import (
    Argument,
    Passing,
    Signature,
    Takes,
    bind_inputs,
    ordinal,
)
from torch_py_backend.streaming import streams

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
    undecided = "model_transaction_policy" not in json.loads(arguments["model_config"])
    settings = model_config.parse(arguments, complete=False)
    found = of_model(settings, undecided=undecided, written=model_config.written_inputs(arguments))
    return {
        "input": [_as_json(spec) for spec in found.inputs],
        "output": [_as_json(spec) for spec in found.outputs],
        "max_batch_size": found.max_batch_size,
        "kept": sorted(found.kept),
        "decoupled": found.decoupled,
    }


def _as_json(spec: TensorSpec) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": spec.name,
        "data_type": spec.dtype.config,
        "dims": list(spec.dims),
    }
    if spec.optional:
        entry["optional"] = True
    # One value a row: Triton wants a dimension, the model must not see it.
    return entry if spec.dims else entry | {"dims": [1], "reshape": {"shape": []}}


def of_model(
    settings: ModelConfig, *, undecided: bool, written: Sequence[TensorSpec] = ()
) -> Schema:
    """The schema of the artifact in a model's version folder.

    Args:
        settings: the model's config, less what is to be told.
        undecided: whether the config leaves open if the model is decoupled.
        written: the inputs in config.pbtxt, if all of them are there: without an example, values
            are made up for them.
    """
    artifact = discovery.find(settings)
    # Whether there is a batch dimension is yet to be told.
    batched = dataclasses.replace(settings, max_batch_size=settings.max_batch_size or 1)
    around = user_hooks.load(batched, artifact)
    if around is not None:
        return _of_hooks(settings, artifact, around, written)
    if undecided and artifact.kind in (Kind.MODULE, Kind.FACTORY):
        # What makes streams is loaded as that.
        settings = dataclasses.replace(settings, decoupled=True)
    if artifact.kind is Kind.EXPORTED:
        return _of_program(settings, exported_program.describe_exported(settings, artifact.path))
    if artifact.kind is not Kind.AOTI:  # compiled code reads memory, which meta tensors lack
        try:
            return _of_example(settings, artifact, _META, written)
        except LoadError:
            raise
        except Exception as error:  # what depends on values, or on the device
            log.debug("model '%s' does not run on meta tensors: %s", settings.name, error)
    try:
        return _of_example(settings, artifact, _device(artifact), written)
    except ForwardError as error:
        if not written or example_inputs.find(settings, artifact) is not None:
            raise
        raise ConfigError(
            settings.name,
            "config.pbtxt lists no outputs, and made-up values for its inputs do not tell them:"
            f" {error}",
            cure=f"Correct the inputs; or put valid values beside the model ({example_inputs.NAME}"
            ".safetensors); or write the outputs into config.pbtxt.",
        ) from error


def takes(arguments: Mapping[str, str]) -> dict[str, Any]:
    """What a model's function takes, as far as its signature tells: it is loaded, and not run.

    Args:
        arguments: what Triton passes to `initialize`.

    Returns:
        As JSON: `signature`, its text; `arguments`, the names of all that can be fed; `inputs`, the
        name of each that must be fed, with data_type and dims where its annotation gives them.

    Raises:
        LoadError: the model cannot be loaded.
    """
    settings = model_config.parse(arguments, complete=False)
    artifact = discovery.find(settings)
    around = user_hooks.load(dataclasses.replace(settings, max_batch_size=1), artifact)
    stage = (around.preprocess or around.preprocess_batch) if around is not None else None
    if stage is not None:
        signature = stage.signature()
    else:
        signature = registry.load(artifact, settings, _META).signature
    named = [one for one in signature.arguments if one.passing in _NAMED]
    needed = [one for one in named if one.required] or named
    leaves = [key for one in needed for key in (one.keys or (one,))]
    return {
        "signature": str(signature),
        "arguments": [one.name for one in named],
        "inputs": [_argument(one) for one in leaves],
    }


def _argument(argument: Argument) -> dict[str, Any]:
    if argument.takes not in _TOLD:
        return {"name": argument.name}
    kind, dims = _TOLD[argument.takes]
    return _as_json(TensorSpec(argument.name, dtypes.from_triton(kind), dims))


def _device(artifact: Artifact) -> torch.device:
    """Where a model is tried: completion and `init` run before an instance has a device."""
    return (
        aotinductor.device_of(artifact.path) if artifact.kind is Kind.AOTI else torch.device("cpu")
    )


# --- exported programs -------------------------------------------------------------------------


def _of_program(settings: ModelConfig, described: exported_program.Described) -> Schema:
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


# --- hooks -----------------------------------------------------------------------------------


def _of_hooks(
    settings: ModelConfig, artifact: Artifact, around: Hooks, written: Sequence[TensorSpec]
) -> Schema:
    """Inputs by example, as they are written, or as annotations tell them; outputs by running all.

    Raises:
        ConfigError: neither tells the inputs, or the model cannot be run with them.
    """
    example = example_inputs.find(settings, artifact)
    told = written if written or example is not None else _annotated(settings, around)
    device = _device(artifact)
    loaded = registry.load(artifact, settings, device)
    if example is None:
        size = settings.max_batch_size if written else _MAX_BATCH_SIZE
        wished = _with_inputs(settings, told, size)
        return _tried(
            wished, loaded, around, sample_inputs.item(wished, 2 if size else None), device
        )
    specs = tuple(_example_spec(settings, name, value) for name, value in example.items())
    if len({spec.dims[:1] for spec in specs}) == 1 and all(spec.dims for spec in specs):
        rows = tuple(dataclasses.replace(spec, dims=spec.dims[1:]) for spec in specs)
        batched = _with_inputs(settings, rows, _batch_size(loaded.rows.most))
        try:
            return _tried(batched, loaded, around, example, device)
        except ConfigError as error:
            if around.per_batch:
                raise
            log.debug("%s It is tried without a batch dimension.", error)
    return _tried(_with_inputs(settings, specs, 0), loaded, around, example, device)


def _with_inputs(
    settings: ModelConfig, specs: Sequence[TensorSpec], max_batch_size: int
) -> ModelConfig:
    return dataclasses.replace(settings, inputs=tuple(specs), max_batch_size=max_batch_size)


_TOLD = {
    Takes.INT: ("INT64", ()),
    Takes.FLOAT: ("FP32", ()),
    Takes.BOOL: ("BOOL", ()),
    Takes.STR: ("BYTES", ()),
    Takes.RAW: ("BYTES", ()),
    Takes.STRINGS: ("BYTES", (-1,)),
    Takes.BYTES: ("BYTES", (-1,)),
}


def _annotated(settings: ModelConfig, around: Hooks) -> tuple[TensorSpec, ...]:
    """The inputs of a row, as far as preprocess() says what each is."""
    stage = around.preprocess or around.preprocess_batch
    arguments = stage.signature().arguments if stage is not None else ()
    told = [_TOLD.get(one.takes) for one in arguments if one.passing in _NAMED]
    if not told or None in told:
        raise _no_example(
            settings,
            "the hooks do not tell the shapes of what they take,"
            " as annotations like `bytes` and `str` do",
        )
    return tuple(
        # Of a batch, a list holds the rows.
        TensorSpec(
            one.name,
            dtypes.from_triton(kind),
            dims if stage is around.preprocess else (),
            optional=not one.required,
        )
        for one, (kind, dims) in zip(arguments, filter(None, told), strict=False)
    )


_NAMED = (Passing.POSITIONAL, Passing.KEYWORD)


def _tried(
    settings: ModelConfig, loaded: Loaded, around: Hooks, example: Item, device: torch.device
) -> Schema:
    """What comes of the example."""
    surroundings = runtime.surround(settings.options, device, ())
    made = Stages(dataclasses.replace(settings, outputs=()), loaded.signature, around, surroundings)
    try:
        with surroundings.guard():
            result, of_row = made.tried(loaded.module, example)
    except Exception as error:  # the model's own code runs here
        failure = error if isinstance(error, BackendError) else _raised(settings, loaded, error)
        raise ConfigError(
            settings.name,
            f"config.pbtxt lists no inputs or no outputs, and the hooks cannot be run to tell them:"
            f" {failure}",
            cure=f"Put valid inputs beside the model, in a function {example_inputs.NAME}() or"
            f" {example_inputs.NAME}.safetensors, or write the outputs into config.pbtxt.",
        ) from error
    names = results.names(result)
    parts = results.bind_outputs(settings.name, names, result, "postprocess()")(result)
    values = {
        name: output_extraction.plain(settings.name, name, part)
        for name, part in zip(names, parts, strict=True)
    }
    batched = settings.max_batch_size > 0
    return Schema(
        settings.inputs,
        tuple(
            _of_row(settings, name, value)
            if batched and of_row
            else _tensor(settings, name, value, batched=batched)
            for name, value in values.items()
        ),
        settings.max_batch_size,
    )


def _of_row(settings: ModelConfig, name: str, value: Value) -> TensorSpec:
    return TensorSpec(name, _kind(settings, name, value), tuple(value.shape))


# --- by example ------------------------------------------------------------------------------


def _example(settings: ModelConfig, artifact: Artifact, signature: Signature) -> Item:
    found = example_inputs.find(settings, artifact)
    if found is None:
        raise _no_example(
            settings, f"{artifact.kind.value} does not tell the shapes that {signature} takes"
        )
    return found


def _no_example(settings: ModelConfig, reason: str) -> ConfigError:
    return ConfigError(
        settings.name,
        f"config.pbtxt lists no inputs or no outputs, and {reason}",
        expected=f"{example_inputs.NAME}.safetensors in the version folder, or a function"
        f" {example_inputs.NAME}() in model.py that returns a dict of tensors by input name",
        cure="Add one of them, or write the inputs and outputs into config.pbtxt.",
    )


def _of_example(
    settings: ModelConfig,
    artifact: Artifact,
    device: torch.device,
    written: Sequence[TensorSpec] = (),
) -> Schema:
    """Run once with the example and once with twice their rows: what grows is the batch.

    Where there is none, `written` inputs get made-up values.

    Raises:
        ForwardError: forward() fails with the example; on meta tensors, with twice their rows too.
    """
    loaded = registry.load(artifact, settings, device)
    if written:
        given = example_inputs.find(settings, artifact) or {}
        return _of_written(settings, loaded, device, written, given)
    example = _begun(settings, loaded, _example(settings, artifact, loaded.signature))
    return _of_item(settings, loaded, device, example)


def _of_written(
    settings: ModelConfig,
    loaded: Loaded,
    device: torch.device,
    written: Sequence[TensorSpec],
    given: Item,
) -> Schema:
    """As by example, for the inputs that the config lists, with values as the warm-up has them.

    Sizes of -1 are tried in two ways: what differs in the outputs is -1, too.
    """
    listed = dataclasses.replace(settings, inputs=tuple(written))
    valid = {
        spec.name: given[spec.name]
        for spec in written
        if spec.name in given and sample_inputs.fits(listed, spec, given[spec.name])
    }
    rows = 2 if settings.max_batch_size else None

    def tried(*, shrunk: bool) -> Schema:
        item = sample_inputs.item(listed, rows, shrunk=shrunk, example=valid)
        return _of_item(settings, loaded, device, _begun(settings, loaded, item))

    schema = tried(shrunk=False)
    if all(-1 not in spec.dims for spec in written):
        return schema
    try:
        smaller = tried(shrunk=True)
    except ForwardError:
        if device is _META:
            raise
        return schema  # it takes the sizes of the example and no others
    if [*map(_form, schema.outputs)] != [*map(_form, smaller.outputs)]:
        raise ConfigError(
            settings.name,
            "config.pbtxt lists no outputs, and the model returns other outputs for other sizes:"
            f" {shown(map(str, schema.outputs))}, or {shown(map(str, smaller.outputs))}",
            cure="Write fixed sizes for the inputs, or write the outputs into config.pbtxt.",
        )
    outputs = tuple(map(_varying, schema.outputs, smaller.outputs))
    return dataclasses.replace(schema, outputs=outputs)


def _form(spec: TensorSpec) -> tuple[str, dtypes.DType, int]:
    """What a config fixes of an output."""
    return spec.name, spec.dtype, len(spec.dims)


def _varying(spec: TensorSpec, smaller: TensorSpec) -> TensorSpec:
    """An output whose sizes are -1 where they hang on those of the inputs."""
    sizes = zip(spec.dims, smaller.dims, strict=True)
    return dataclasses.replace(
        spec, dims=tuple(one if one == other else -1 for one, other in sizes)
    )


def _of_item(settings: ModelConfig, loaded: Loaded, device: torch.device, example: Item) -> Schema:
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
            most = _most_rows(settings, loaded, example, device)
            return _schema(settings, loaded, example, once, _batch_size(most))
    return _schema(settings, loaded, example, once, 0)


def _begun(settings: ModelConfig, loaded: Loaded, example: Item) -> Item:
    """The example with what a request does not bring: first states, and controls."""
    if settings.sequencing is None:
        return example
    rows = {value.shape[0] for value in example.values() if value.ndim}
    count = rows.pop() if settings.max_batch_size and len(rows) == 1 else None
    specs = tuple(_example_spec(settings, name, value) for name, value in example.items())
    config = state_store.bound(dataclasses.replace(settings, inputs=specs), loaded.signature)
    return {
        **initial_states.find(settings, count),
        **sample_inputs.item(config, count, example=example),
    }


def _example_spec(settings: ModelConfig, name: str, value: Value) -> TensorSpec:
    return TensorSpec(name, _kind(settings, name, value), tuple(value.shape))


def _kind(settings: ModelConfig, name: str, value: Value) -> dtypes.DType:
    if isinstance(value, Tensor):
        return _dtype(settings, name, value.dtype)
    return dtypes.from_triton("BYTES")


def _raised(settings: ModelConfig, loaded: Loaded, error: Exception) -> ForwardError:
    """What the model's own code has raised; of two functions it may have been either."""
    called = loaded.signature.name if loaded.step is None else f"{loaded.signature.name}() or step"
    return ForwardError(settings.name, error, called)


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
    admitted = intake.admit(example)
    if isinstance(admitted, InputError):
        raise admitted
    (group,) = intake.group([(0, admitted)])
    columns = [admitted[name] for name in group.inputs.names]
    try:
        passed = intake.convert(group.inputs, columns)  # numbers need values
        with torch.inference_mode(), device:
            passed = [one.to(device) if isinstance(one, Tensor) else one for one in passed]
            result = streams.first(
                settings.name, loaded.step, group.inputs.call(loaded.module, passed)
            )
    except Exception as error:  # the model's own code runs here
        raise _raised(settings, loaded, error) from error
    names = results.names(result)
    parts = results.bind_outputs(settings.name, names, result)(result)
    values = {
        name: output_extraction.plain(settings.name, name, part)
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
    max_batch_size: int,
) -> Schema:
    batched = max_batch_size > 0
    return Schema(
        tuple(_tensor(settings, name, value, batched=batched) for name, value in example.items()),
        tuple(
            _tensor(settings, name, value, batched=batched) for name, value in made.values.items()
        ),
        max_batch_size,
        made.kept.union(_kept_inputs(settings)),
        decoupled=loaded.streams,
    )


def _most_rows(
    settings: ModelConfig, loaded: Loaded, examples: Item, device: torch.device
) -> int | None:
    if loaded.kind is not Kind.AOTI:
        return loaded.rows.most
    inputs = bind_inputs(settings.name, list(examples), loaded.signature)
    values = [examples[name] for name in inputs.names]
    columns = [value.to(device) for value in values if isinstance(value, Tensor)]
    return size_probing.most_rows(lambda leaves: inputs.call(loaded.module, leaves), columns)


def _tensor(settings: ModelConfig, name: str, value: Value, *, batched: bool) -> TensorSpec:
    dims = tuple(value.shape[1:] if batched else value.shape)
    # Without a batch there is no reshape to nothing: a single value is a list of one.
    kind = _kind(settings, name, value)
    return TensorSpec(name, kind, dims if batched else dims or (1,))
