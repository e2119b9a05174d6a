"""Infers the schema of a model: names, types and dims of its tensors, and its max_batch_size.

The functions for other modules run in a child process (`completion`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.autocomplete import specs
from torch_py_backend.autocomplete.specs import Schema
from torch_py_backend.config import dtypes, model_config
from torch_py_backend.config.dtypes import DType
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.engine import runtime
from torch_py_backend.engine.runtime import Runtime
from torch_py_backend.errors import BackendError, ConfigError, ForwardError
from torch_py_backend.loading import (
    aotinductor,
    discovery,
    example_inputs,
    exported,
    registry,
)
from torch_py_backend.loading import hooks as user_hooks
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.loading.hooks import Hooks
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.pipeline.hooks import HookedPipeline
from torch_py_backend.pipeline.inputs import Inputs
from torch_py_backend.signature.arguments import ArgumentType
from torch_py_backend.values import Item

_BYTES = dtypes.from_triton("BYTES")
# The types and dims of annotations, for one row.
_ANNOTATED: Mapping[ArgumentType, tuple[DType, tuple[int, ...]]] = {
    ArgumentType.INT: (dtypes.from_triton("INT64"), ()),
    ArgumentType.FLOAT: (dtypes.from_triton("FP32"), ()),
    ArgumentType.BOOL: (dtypes.from_triton("BOOL"), ()),
    ArgumentType.STR: (_BYTES, ()),
    ArgumentType.RAW: (_BYTES, ()),
    ArgumentType.STRINGS: (_BYTES, (-1,)),
    ArgumentType.BYTES: (_BYTES, (-1,)),
}


def describe(arguments: Mapping[str, str]) -> JsonObject:
    """Return the schema of a model as JSON.

    Args:
        arguments: the arguments that Triton passes to `initialize`; the config may lack inputs and
            outputs.

    Raises:
        LoadError: the model cannot be loaded, or its schema cannot be inferred.
    """
    config = model_config.parse(arguments, complete=False)
    schema = _infer(config, arguments)
    return {
        "input": [specs.entry_of(spec) for spec in schema.inputs],
        "output": [specs.entry_of(spec) for spec in schema.outputs],
        "max_batch_size": schema.max_batch_size,
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
    hook = (hooks.preprocess or hooks.preprocess_batch) if hooks is not None else None
    signature = (
        hook.signature()
        if hook
        else registry.load(artifact, config, _trial_device(artifact)).signature
    )
    named = [argument for argument in signature.arguments if argument.named]
    required = [argument for argument in named if argument.required] or named
    return {
        "signature": str(signature),
        "arguments": [argument.name for argument in named],
        "inputs": [
            specs.entry_of(TensorSpec(argument.name, *_ANNOTATED[argument.type]))
            if argument.type in _ANNOTATED
            else {"name": argument.name}
            for argument in required
        ],
    }


def _trial_device(artifact: Artifact) -> torch.device:
    """Return the device of a trial, which happens before an instance has one."""
    packaged = artifact.kind is ArtifactType.AOTI
    return aotinductor.device_of(artifact.path) if packaged else torch.device("cpu")


def _infer(config: ModelConfig, arguments: Mapping[str, str]) -> Schema:
    """Return the schema of the artifact in a model's version folder.

    Without an example, the values of the inputs in config.pbtxt are made up.
    """
    artifact = discovery.find(config)
    device = _trial_device(artifact)
    # Inputs of which one lacks its type or dims are not listed.
    listed = model_config.listed_inputs(arguments)
    # The batch dimension is not known yet; hooks for batches need one.
    batched = dataclasses.replace(config, max_batch_size=config.max_batch_size or 1)
    hooks = user_hooks.load(batched, artifact)
    if hooks is not None:
        return _with_hooks(config, artifact, hooks, listed, device)
    if artifact.kind is ArtifactType.EXPORTED:
        with registry.beside_imported(artifact):
            return _from_program(artifact.path)
    loaded = registry.load(artifact, config, device)
    example = example_inputs.find(config, artifact)
    runs = _Runs(config, loaded, runtime.create(config.options, device, ()))
    if not listed and example is None:
        for entry in json.loads(arguments["model_config"]).get("input", ()):
            if not entry.get("dims"):
                raise specs.without_dims(config, entry["name"])
        kind, signature = artifact.kind.value, loaded.signature
        raise specs.no_example(f"{kind} does not define the shapes that {signature} takes")
    if not listed:
        return runs.schema(example or {})
    try:
        return runs.schema_of_listed(listed, example or {})
    except ForwardError as error:
        if example is not None:
            raise
        raise ConfigError(
            "config.pbtxt lists no outputs, and the model fails with made-up values for its inputs:"
            f" {error}",
            cure=f"Correct the inputs; or put valid values beside the model ({example_inputs.NAME}"
            ".safetensors); or write the outputs into config.pbtxt.",
        ) from error


def _from_program(path: Path) -> Schema:
    """Return the schema that an exported program declares; sizes that are not fixed are -1."""
    *tensors, rows = exported.describe(path)
    inputs, outputs = (specs.of_values(values) for values in tensors)
    # A fixed first dimension is not taken for a batch.
    batched = {spec.dims[:1] for spec in (*inputs, *outputs)} == {(-1,)}
    return specs.schema_of(inputs, outputs, rows.most, batched=batched)


# --- runs --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of a loaded model."""

    config: ModelConfig
    loaded: Loaded
    runtime: Runtime

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
            return schema  # the model takes the sizes of the example only
        return specs.with_varying(schema, smaller)

    def schema(self, item: Item) -> Schema:
        """Return the schema from a run with an item and one with twice its rows.

        The first dimension is the batch if it, and no other, doubles in every output.
        """
        inputs, outputs = specs.of_values(item), self._call(item)
        batched = len({spec.dims[:1] for spec in inputs}) == 1 and bool(inputs[0].dims)
        if batched:
            rows = inputs[0].dims[0]
            grown = [
                dataclasses.replace(spec, dims=(2 * rows, *spec.dims[1:]))
                for spec in outputs
                if spec.dims[:1] == (rows,)
            ]
            doubled: Item = {
                name: torch.cat([value, value])
                if isinstance(value, Tensor)
                else np.concatenate([value, value])
                for name, value in item.items()
            }
            try:
                batched = grown == [*self._call(doubled)]
            except ForwardError:
                batched = False
        return specs.schema_of(inputs, outputs, self.loaded.rows.most, batched=batched)

    def _call(self, item: Item) -> tuple[TensorSpec, ...]:
        """Return the specs of all outputs."""
        config = dataclasses.replace(self.config, max_batch_size=0, inputs=specs.of_values(item))
        inputs, module = Inputs(config, self.loaded.signature), self.loaded.module
        group = inputs.stage(lambda binding: lambda *columns: binding.call(module, columns))
        (entry,), groups = group([item])
        if isinstance(entry, BackendError):
            raise entry
        columns, _ = groups[0].gather(groups[0].items)
        try:
            with self.runtime.guard():
                result = groups[0].call(*self.runtime.to_device(columns))
        except Exception as error:  # the model's own code runs here
            raise ForwardError(error, self.loaded.signature.name) from error
        return specs.of_result(result, "forward()")


# --- hooks -------------------------------------------------------------------------------------


def _with_hooks(
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
    inputs = listed or (_annotated(hooks) if example is None else ())
    loaded = registry.load(artifact, config, device)

    def run(inputs: Sequence[TensorSpec], size: int, item: Item | None) -> Schema:
        settings = dataclasses.replace(config, inputs=tuple(inputs), max_batch_size=size)
        item = item or example_inputs.item(settings, 2 if size else None)
        return _run_hooks(settings, loaded, hooks, item, device)

    if example is None:
        return run(inputs, config.max_batch_size if listed else specs.DEFAULT_BATCH_SIZE, None)
    inputs = specs.of_values(example)
    if len({spec.dims[:1] for spec in inputs}) == 1 and inputs[0].dims:
        row, size = specs.row_specs(inputs, batched=True), specs.batch_size(loaded.rows.most)
        try:
            schema = run(row, size, example)
        except ConfigError:
            if hooks.per_batch:
                raise
        else:
            # Rows of an example, such as texts of different lengths, show which dims vary.
            for at in range(2 if inputs[0].dims[0] > 1 else 0):
                with contextlib.suppress(ConfigError):  # the model takes no single row
                    single = {name: value[at : at + 1] for name, value in example.items()}
                    schema = specs.with_varying(schema, run(row, size, single))
            return schema
    return run(inputs, 0, example)


def _annotated(hooks: Hooks) -> tuple[TensorSpec, ...]:
    """Return the inputs of one row, from the annotations of the first hook."""
    hook = hooks.preprocess or hooks.preprocess_batch
    arguments = hook.signature().arguments if hook is not None else ()
    named = [argument for argument in arguments if argument.named]
    if not named or any(argument.type not in _ANNOTATED for argument in named):
        raise specs.no_example(
            "the hooks do not define the shapes of their inputs,"
            " as annotations like `bytes` and `str` do",
        )
    inputs = []
    for argument in named:
        dtype, dims = _ANNOTATED[argument.type]
        # The list that a hook for batches takes holds the rows.
        dims = dims if hook is hooks.preprocess else ()
        inputs.append(TensorSpec(argument.name, dtype, dims, optional=not argument.required))
    return tuple(inputs)


def _run_hooks(
    config: ModelConfig, loaded: Loaded, hooks: Hooks, example: Item, device: torch.device
) -> Schema:
    """Run the hooks and the model with an example and return the schema.

    Raises:
        ConfigError: the hooks or the model fail.
    """
    device_runtime = runtime.create(config.options, device, ())
    without_outputs = dataclasses.replace(config, outputs=())
    pipeline = HookedPipeline(without_outputs, loaded.signature, hooks, device_runtime.device)
    try:
        with device_runtime.guard():
            result, of_row = pipeline.run_unchecked(loaded.module, example)
    except Exception as error:  # the model's own code runs here
        known = isinstance(error, BackendError)
        reason = error if known else ForwardError(error, loaded.signature.name)
        raise ConfigError(
            "config.pbtxt lists no inputs or no outputs, and the hooks cannot be run to infer them:"
            f" {reason}",
            cure=f"Put valid inputs beside the model, in a function {example_inputs.NAME}() or"
            f" {example_inputs.NAME}.safetensors, or write the outputs into config.pbtxt.",
        ) from error
    outputs = specs.of_result(result, "postprocess()")
    batched = config.max_batch_size > 0
    if not (batched and of_row):
        outputs = specs.row_specs(outputs, batched=batched)
    return Schema(config.inputs, outputs, config.max_batch_size)
