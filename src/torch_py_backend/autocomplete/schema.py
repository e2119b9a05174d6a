"""Infers the schema of a model: names, types and dims of its tensors, and its max_batch_size."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.artifacts import discovery
from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.batching import output_extraction, runtime
from torch_py_backend.batching.gather_scatter import Item, Value
from torch_py_backend.batching.grouping import Grouping
from torch_py_backend.config import dtypes, model_config, pbtxt
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import (
    BackendError,
    ConfigError,
    ForwardError,
    InputError,
    LoadError,
    SourceError,
    join_names,
)
from torch_py_backend.hooks import user_hooks
from torch_py_backend.hooks.hooked_pipeline import HookedPipeline
from torch_py_backend.hooks.user_hooks import Hooks
from torch_py_backend.loading import (
    aotinductor,
    example_inputs,
    exported_program,
    registry,
    size_probing,
)
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.sequences import initial_states, state_store
from torch_py_backend.signature import results
from torch_py_backend.signature.arguments import ArgumentType, ordinal
from torch_py_backend.signature.binding import bind_inputs
from torch_py_backend.streaming import streams

log = logging.getLogger(__name__)

# Tensors with shapes and types and without values: forward() on them computes nothing.
_META = torch.device("meta")
# The max_batch_size of a model that takes any number of rows.
_DEFAULT_BATCH_SIZE = 8
# A larger limit in an exported program stands for "any number of rows".
_LARGEST_BATCH_SIZE = 4096
# The data types and dims of annotations.
_ANNOTATED: Mapping[ArgumentType, tuple[str, tuple[int, ...]]] = {
    ArgumentType.INT: ("INT64", ()),
    ArgumentType.FLOAT: ("FP32", ()),
    ArgumentType.BOOL: ("BOOL", ()),
    ArgumentType.STR: ("BYTES", ()),
    ArgumentType.RAW: ("BYTES", ()),
    ArgumentType.STRINGS: ("BYTES", (-1,)),
    ArgumentType.BYTES: ("BYTES", (-1,)),
}


@dataclass(frozen=True, slots=True)
class Schema:
    """The tensors of a model, without the batch dimension if max_batch_size is above 0.

    Attributes:
        sequence_tensors: names of inputs and outputs that are states and controls of sequences.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    sequence_tensors: frozenset[str] = frozenset()
    decoupled: bool = False


def describe(arguments: Mapping[str, str]) -> JsonObject:
    """Return the schema of a model as JSON. Runs in a child process.

    Args:
        arguments: the arguments that Triton passes to `initialize`; the config may lack inputs and
            outputs.

    Raises:
        LoadError: the model cannot be loaded, or its schema cannot be inferred.
    """
    undecided = "model_transaction_policy" not in json.loads(arguments["model_config"])
    config = model_config.parse(arguments, complete=False)
    schema = _infer(config, model_config.listed_inputs(arguments), undecided=undecided)
    return {
        "input": [entry_of(spec) for spec in schema.inputs],
        "output": [entry_of(spec) for spec in schema.outputs],
        "max_batch_size": schema.max_batch_size,
        "sequence_tensors": sorted(schema.sequence_tensors),
        "decoupled": schema.decoupled,
    }


def describe_arguments(arguments: Mapping[str, str]) -> JsonObject:
    """Return the arguments of a model's function, from its signature. The model is not run.

    Args:
        arguments: the arguments that Triton passes to `initialize`.

    Returns:
        As JSON: `signature`, its text; `arguments`, the names of all that can be inputs; `inputs`,
        the name of each required one, with data_type and dims if its annotation defines them.

    Raises:
        LoadError: the model cannot be loaded.
    """
    config = model_config.parse(arguments, complete=False)
    artifact = discovery.find(config)
    hooks = user_hooks.load(dataclasses.replace(config, max_batch_size=1), artifact)
    stage = (hooks.preprocess or hooks.preprocess_batch) if hooks is not None else None
    signature = stage.signature() if stage else registry.load(artifact, config, _META).signature
    named = [argument for argument in signature.arguments if argument.named]
    required = [argument for argument in named if argument.required] or named
    inputs: list[JsonObject] = []
    for argument in (leaf for owner in required for leaf in owner.keys or (owner,)):
        data_type, dims = _ANNOTATED.get(argument.type, ("", ()))
        if data_type:
            inputs.append(entry_of(TensorSpec(argument.name, dtypes.from_triton(data_type), dims)))
        else:
            inputs.append({"name": argument.name})
    return {
        "signature": str(signature),
        "arguments": [argument.name for argument in named],
        "inputs": inputs,
    }


def entry_of(spec: TensorSpec) -> JsonObject:
    entry: JsonObject = {
        "name": spec.name,
        "data_type": spec.dtype.config,
        **pbtxt.dims_entry(spec.dims),
    }
    if spec.optional:
        entry["optional"] = True
    return entry


def _infer(config: ModelConfig, listed: Sequence[TensorSpec], *, undecided: bool) -> Schema:
    """Return the schema of the artifact in a model's version folder.

    `listed` are the inputs in config.pbtxt, if all are complete. Without an example, their values
    are made up. `undecided`: config.pbtxt does not say whether the model is decoupled.
    """
    artifact = discovery.find(config)
    packaged = artifact.kind is ArtifactType.AOTI
    # Trial runs happen before an instance has a device.
    device = aotinductor.device_of(artifact.path) if packaged else torch.device("cpu")
    # The batch dimension is not known yet; hooks for batches need one.
    batched = dataclasses.replace(config, max_batch_size=config.max_batch_size or 1)
    hooks = user_hooks.load(batched, artifact)
    if hooks is not None:
        return _from_hooks(config, artifact, hooks, listed, device)
    if undecided and artifact.kind in (ArtifactType.MODULE, ArtifactType.FACTORY):
        # Otherwise, a model that makes streams would be refused.
        config = dataclasses.replace(config, decoupled=True)
    if artifact.kind is ArtifactType.EXPORTED:
        return _from_program(config, exported_program.describe(config, artifact.path))
    if not packaged:  # compiled code reads memory, which meta tensors lack
        try:
            return _from_runs(config, artifact, _META, listed)
        except LoadError:
            raise
        except Exception as error:  # the model reads values, or the device
            log.debug("model '%s' does not run on meta tensors: %s", config.name, error)
    try:
        return _from_runs(config, artifact, device, listed)
    except ForwardError as error:
        if not listed or example_inputs.find(config, artifact) is not None:
            raise
        raise ConfigError(
            config.name,
            "config.pbtxt lists no outputs, and the model fails with made-up values for its inputs:"
            f" {error}",
            cure=f"Correct the inputs; or put valid values beside the model ({example_inputs.NAME}"
            ".safetensors); or write the outputs into config.pbtxt.",
        ) from error


def with_varying(schema: Schema, other: Schema) -> Schema:
    """Return a schema with -1 for the dims of outputs that differ from those of another run."""
    outputs = (
        dataclasses.replace(
            spec,
            dims=tuple(a if a == b else -1 for a, b in zip(spec.dims, varied.dims, strict=True)),
        )
        if len(spec.dims) == len(varied.dims)
        else spec
        for spec, varied in zip(schema.outputs, other.outputs, strict=True)
    )
    return dataclasses.replace(schema, outputs=tuple(outputs))


def _batch_size(most_rows: int | None) -> int:
    if most_rows is None or most_rows > _LARGEST_BATCH_SIZE:
        return _DEFAULT_BATCH_SIZE
    return most_rows


def _dtype(config: ModelConfig, name: str, dtype: torch.dtype) -> dtypes.DType:
    try:
        return dtypes.from_torch(str(dtype).removeprefix("torch."))
    except KeyError:
        raise SourceError(
            config.name,
            f"tensor '{name}' is {str(dtype).removeprefix('torch.')}, which no request can carry",
            expected=", ".join(row.torch for row in dtypes.TABLE if row.torch),
        ) from None


def _specs(config: ModelConfig, values: Mapping[str, Value]) -> tuple[TensorSpec, ...]:
    """Return the specs of values, with all dims."""
    strings = dtypes.from_triton("BYTES")
    return tuple(
        TensorSpec(
            name,
            _dtype(config, name, value.dtype) if isinstance(value, Tensor) else strings,
            tuple(value.shape),
        )
        for name, value in values.items()
    )


def _row_specs(specs: Iterable[TensorSpec], *, batched: bool) -> tuple[TensorSpec, ...]:
    """Return specs without the batch dimension, if there is one."""
    # Without a batch dimension Triton allows no empty dims: a scalar is a list of one value.
    return tuple(
        dataclasses.replace(spec, dims=spec.dims[1:] if batched else spec.dims or (1,))
        for spec in specs
    )


def _named_parts(config: ModelConfig, result: object, of: str) -> dict[str, object]:
    """Return the leaves of a result by their names."""
    names = results.leaf_names(result)
    parts = results.bind_outputs(config.name, names, result, of)(result)
    return dict(zip(names, parts, strict=True))


def _output_specs(config: ModelConfig, parts: Mapping[str, object]) -> tuple[TensorSpec, ...]:
    """Return the specs of a result's leaves, with all dims."""
    values = (
        (name, output_extraction.unchecked(config.name, name, part)) for name, part in parts.items()
    )
    return _specs(config, dict(values))


# --- exported programs -------------------------------------------------------------------------


def _from_program(config: ModelConfig, described: exported_program.Description) -> Schema:
    """Return the schema that an exported program declares; sizes that are not fixed are -1."""
    first_dims = {dims[:1] for _, _, dims in (*described.inputs, *described.outputs)}
    batched = first_dims == {(-1,)}  # a fixed first dimension is not taken for a batch
    inputs, outputs = (
        _row_specs(
            (TensorSpec(name, _dtype(config, name, dtype), dims) for name, dtype, dims in tensors),
            batched=batched,
        )
        for tensors in (described.inputs, described.outputs)
    )
    states = [state.output for state in config.states]
    hidden = [*_names_of(_sequence_inputs(config), inputs), *_names_of(states, outputs)]
    max_batch_size = _batch_size(described.rows.most) if batched else 0
    return Schema(inputs, outputs, max_batch_size, frozenset(hidden))


def _sequence_inputs(config: ModelConfig) -> list[str]:
    """Return the config's names of the inputs that are states and controls of sequences."""
    controls = config.sequencing.controls if config.sequencing is not None else ()
    return [*(state.input for state in config.states), *(control.name for control in controls)]


def _names_of(references: Iterable[str], specs: Sequence[TensorSpec]) -> Iterator[str]:
    """Yield the program's names for a config's references: names, or ordinals like INPUT__0."""
    names = [spec.name for spec in specs]
    for reference in references:
        number = ordinal(reference)
        if reference in names:
            yield reference
        elif number is not None and number < len(names):
            yield names[number]


# --- hooks -----------------------------------------------------------------------------------


def _from_hooks(
    config: ModelConfig,
    artifact: Artifact,
    hooks: Hooks,
    listed: Sequence[TensorSpec],
    device: torch.device,
) -> Schema:
    """Return inputs from an example, the config or annotations, and outputs from a trial run.

    Raises:
        ConfigError: the inputs cannot be inferred, or the hooks cannot be run with them.
    """
    example = example_inputs.find(config, artifact)
    specs = listed if listed or example is not None else _annotated(config, hooks)
    loaded = registry.load(artifact, config, device)

    def run(inputs: Sequence[TensorSpec], size: int) -> Schema:
        settings = dataclasses.replace(config, inputs=tuple(inputs), max_batch_size=size)
        item = example or example_inputs.item(settings, 2 if size else None)
        schema = run_hooks(settings, loaded, hooks, item, device)
        rows = len(next(iter(item.values()))) if size and example is not None else 0
        # Rows of an example, such as texts of different lengths, show which dims of outputs vary.
        for row in range(min(rows, 2) if rows > 1 else 0):
            single = {name: value[row : row + 1] for name, value in item.items()}
            with contextlib.suppress(ConfigError):  # the model takes no single row
                schema = with_varying(schema, run_hooks(settings, loaded, hooks, single, device))
        return schema

    if example is None:
        return run(specs, config.max_batch_size if listed else _DEFAULT_BATCH_SIZE)
    specs = _specs(config, example)
    if len({spec.dims[:1] for spec in specs}) == 1 and all(spec.dims for spec in specs):
        try:
            return run(_row_specs(specs, batched=True), _batch_size(loaded.rows.most))
        except ConfigError as error:
            if hooks.per_batch:
                raise
            log.debug("%s It is tried without a batch dimension.", error)
    return run(specs, 0)


def _annotated(config: ModelConfig, hooks: Hooks) -> tuple[TensorSpec, ...]:
    """Return the inputs of one row, from the annotations of the first hook."""
    stage = hooks.preprocess or hooks.preprocess_batch
    arguments = stage.signature().arguments if stage is not None else ()
    annotated = [_ANNOTATED.get(argument.type) for argument in arguments if argument.named]
    if not annotated or None in annotated:
        raise _no_example(
            config,
            "the hooks do not define the shapes of their inputs,"
            " as annotations like `bytes` and `str` do",
        )
    return tuple(
        # The list that a hook for batches takes holds the rows.
        TensorSpec(
            argument.name,
            dtypes.from_triton(data_type),
            dims if stage is hooks.preprocess else (),
            optional=not argument.required,
        )
        for argument, (data_type, dims) in zip(arguments, filter(None, annotated), strict=False)
    )


def run_hooks(
    config: ModelConfig, loaded: Loaded, hooks: Hooks, example: Item, device: torch.device
) -> Schema:
    """Run the hooks and the model with an example and return the schema."""
    device_runtime = runtime.create(config.options, device, ())
    without_outputs = dataclasses.replace(config, outputs=())
    pipeline = HookedPipeline(without_outputs, loaded.signature, hooks, device_runtime)
    try:
        with device_runtime.guard():
            result, of_row = pipeline.tried(loaded.module, example)
    except Exception as error:  # the model's own code runs here
        known = isinstance(error, BackendError)
        raise ConfigError(
            config.name,
            "config.pbtxt lists no inputs or no outputs, and the hooks cannot be run to infer them:"
            f" {error if known else _forward_error(config, loaded, error)}",
            cure=f"Put valid inputs beside the model, in a function {example_inputs.NAME}() or"
            f" {example_inputs.NAME}.safetensors, or write the outputs into config.pbtxt.",
        ) from error
    outputs = _output_specs(config, _named_parts(config, result, "postprocess()"))
    batched = config.max_batch_size > 0
    if not (batched and of_row):
        outputs = _row_specs(outputs, batched=batched)
    return Schema(config.inputs, outputs, config.max_batch_size)


# --- by example ------------------------------------------------------------------------------


def _no_example(config: ModelConfig, reason: str) -> ConfigError:
    return ConfigError(
        config.name,
        f"config.pbtxt lists no inputs or no outputs, and {reason}",
        expected=f"{example_inputs.NAME}.safetensors in the version folder, or a function"
        f" {example_inputs.NAME}() in model.py that returns a dict of tensors by input name",
        cure="Add one of them, or write the inputs and outputs into config.pbtxt.",
    )


def _forward_error(config: ModelConfig, loaded: Loaded, error: Exception) -> ForwardError:
    name = loaded.signature.name if loaded.step is None else f"{loaded.signature.name}() or step"
    return ForwardError(config.name, error, name)


def _from_runs(
    config: ModelConfig, artifact: Artifact, device: torch.device, listed: Sequence[TensorSpec]
) -> Schema:
    """Run the model with the example, or with made-up values for listed inputs.

    Raises:
        ForwardError: forward() fails with the example; on meta tensors, with twice its rows, too.
    """
    trial = _Trial(config, registry.load(artifact, config, device), device)
    example = example_inputs.find(config, artifact)
    if listed:
        return trial.schema_of_listed(listed, example or {})
    if example is None:
        kind, signature = artifact.kind.value, trial.loaded.signature
        raise _no_example(config, f"{kind} does not define the shapes that {signature} takes")
    return trial.schema(example)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Runs of a loaded model."""

    config: ModelConfig
    loaded: Loaded
    device: torch.device

    def schema_of_listed(self, listed: Sequence[TensorSpec], example: Item) -> Schema:
        """Return the schema for the inputs in the config, with the values that the warm-up uses.

        Inputs with dims of -1 are run in two sizes: output dims that differ between them are -1.
        """
        config = dataclasses.replace(self.config, inputs=tuple(listed))
        rows = 2 if self.config.max_batch_size else None
        valid = {
            spec.name: example[spec.name]
            for spec in listed
            if spec.name in example and example_inputs.fits(config, spec, example[spec.name])
        }
        schema = self.schema(example_inputs.item(config, rows, example=valid))
        if all(-1 not in spec.dims for spec in listed):
            return schema
        try:
            smaller = self.schema(example_inputs.item(config, rows, shrunk=True, example=valid))
        except ForwardError:
            if self.device is _META:
                raise
            return schema  # the model takes the sizes of the example only
        pairs = list(zip(schema.outputs, smaller.outputs, strict=False))
        same = len(schema.outputs) == len(smaller.outputs) and all(
            (one.name, one.dtype, len(one.dims)) == (other.name, other.dtype, len(other.dims))
            for one, other in pairs
        )
        if not same:
            raise ConfigError(
                self.config.name,
                "config.pbtxt lists no outputs, and the model returns other outputs for other"
                f" sizes: {join_names(map(str, schema.outputs))}, or"
                f" {join_names(map(str, smaller.outputs))}",
                cure="Write fixed sizes for the inputs, or write the outputs into config.pbtxt.",
            )
        return with_varying(schema, smaller)

    def schema(self, item: Item) -> Schema:
        """Return the schema from a run with an item and one with twice its rows.

        The first dimension is the batch if it grows.
        """
        example = self._with_sequence_inputs(item)
        inputs = _specs(self.config, example)
        outputs, states = self._call(example)
        first_dims = {spec.dims[:1] for spec in inputs}
        batched = len(first_dims) == 1 and first_dims != {()} and self._grows(example, outputs)
        max_batch_size = 0
        if batched:
            packaged = self.loaded.kind is ArtifactType.AOTI
            most = self._probe_rows(example) if packaged else self.loaded.rows.most
            max_batch_size = _batch_size(most)
        return Schema(
            _row_specs(inputs, batched=batched),
            _row_specs(outputs, batched=batched),
            max_batch_size,
            states.union(_sequence_inputs(self.config)),
            self.loaded.streams,
        )

    def _with_sequence_inputs(self, example: Item) -> Item:
        """Return the example with initial states and controls, which requests do not contain."""
        if self.config.sequencing is None:
            return example
        rows = {value.shape[0] for value in example.values() if value.ndim}
        count = rows.pop() if self.config.max_batch_size and len(rows) == 1 else None
        config = dataclasses.replace(self.config, inputs=_specs(self.config, example))
        bound = state_store.with_controls(config, self.loaded.signature)
        return {
            **initial_states.find(self.config, count),
            **example_inputs.item(bound, count, example=example),
        }

    def _call(self, item: Item) -> tuple[tuple[TensorSpec, ...], frozenset[str]]:
        """Return the specs of all outputs, and the names of those that are states of a sequence."""
        config = dataclasses.replace(
            self.config, max_batch_size=0, inputs=_specs(self.config, item)
        )
        grouping = Grouping(config, self.loaded.signature)
        admitted = grouping.admit(item)
        if isinstance(admitted, InputError):
            raise admitted
        (group,) = grouping.group([(0, admitted)])
        columns = [admitted[name] for name in group.inputs.names]
        try:
            arguments = grouping.convert(group.inputs, columns)  # numbers need values
            with torch.inference_mode(), self.device:
                arguments = [
                    argument.to(self.device) if isinstance(argument, Tensor) else argument
                    for argument in arguments
                ]
                returned = group.inputs.call(self.loaded.module, arguments)
                result = streams.first_outputs(config.name, self.loaded.step, returned)
        except Exception as error:  # the model's own code runs here
            raise _forward_error(config, self.loaded, error) from error
        parts = _named_parts(config, result, "forward()")
        names = {id(part): name for name, part in parts.items()}
        references = [state.output for state in config.states]
        states: Sequence[object] = ()
        if references:
            states = results.bind_outputs(config.name, references, result)(result)
        return _output_specs(config, parts), frozenset(names[id(part)] for part in states)

    def _grows(self, example: Item, outputs: Sequence[TensorSpec]) -> bool:
        """Return whether the first dim of every output, and no other, doubles with the rows."""
        doubled: Item = {
            name: torch.cat([value, value])
            if isinstance(value, Tensor)
            else np.concatenate([value, value])
            for name, value in example.items()
        }
        try:
            twice, _ = self._call(doubled)
        except ForwardError:
            if self.device is _META:
                raise
            return False
        rows = next(iter(example.values())).shape[0]
        expected = [
            (spec.name, (2 * rows, *spec.dims[1:])) for spec in outputs if spec.dims[:1] == (rows,)
        ]
        return len(expected) == len(outputs) and expected == [
            (spec.name, spec.dims) for spec in twice
        ]

    def _probe_rows(self, example: Item) -> int | None:
        """Return the largest number of rows of a compiled package; None: no limit."""
        inputs = bind_inputs(self.config.name, list(example), self.loaded.signature)
        values = [example[name] for name in inputs.names]
        columns = [value.to(self.device) for value in values if isinstance(value, Tensor)]
        return size_probing.most_rows(
            lambda leaves: inputs.call(self.loaded.module, leaves), columns
        )
