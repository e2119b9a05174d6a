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
    hook = hooks.first if hooks is not None else None
    signature = hook.signature() if hook else _load(config, artifact).signature
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


def _load(config: ModelConfig, artifact: Artifact) -> Loaded:
    return registry.load(artifact, config, _device(artifact))


def _device(artifact: Artifact) -> torch.device:
    """Return the device of a trial, which happens before an instance has one."""
    packaged = artifact.kind is ArtifactType.AOTI
    return aotinductor.device_of(artifact.path) if packaged else torch.device("cpu")


def _infer(config: ModelConfig, arguments: Mapping[str, str]) -> Schema:
    """Return the schema of the artifact in a model's version folder.

    Without an example, the values of the inputs in config.pbtxt are made up.
    """
    artifact = discovery.find(config)
    # Inputs of which one lacks its type or dims are not listed.
    listed = model_config.listed_inputs(arguments)
    # The batch dimension is not known yet; hooks for batches need one.
    batched = dataclasses.replace(config, max_batch_size=config.max_batch_size or 1)
    hooks = user_hooks.load(batched, artifact)
    if hooks is None and artifact.kind is ArtifactType.EXPORTED:
        with registry.beside_imported(artifact):
            return _from_program(artifact.path)
    loaded = _load(config, artifact)
    example = example_inputs.find(config, artifact)
    device_runtime = runtime.create(config.options, _device(artifact), ())
    if hooks is not None:
        trial = _HookedTrial(config, loaded, hooks, device_runtime)
        if example is not None:
            return trial.of_example(example)
        rows = config.max_batch_size if listed else specs.DEFAULT_BATCH_SIZE
        return trial.run(listed or _annotated(hooks), rows)
    runs = _Runs(config, loaded, device_runtime)
    if not listed and example is None:
        without_dims = (
            entry["name"]
            for entry in json.loads(arguments["model_config"]).get("input", ())
            if not entry.get("dims")
        )
        raise _no_inputs(
            f"{artifact.kind.value} does not define the shapes that {loaded.signature} takes",
            next(without_dims, None),
        )
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


def _no_inputs(reason: str, without_dims: str | None = None) -> ConfigError:
    """Return the error of a model whose inputs neither the config nor an example defines."""
    problem = f"config.pbtxt lists no inputs or no outputs, and {reason}"
    if without_dims is not None:
        problem = (
            f"input '{without_dims}' has no dims; for one value per row: dims: [ 1 ], reshape"
            " { shape: [ ] } (without max_batch_size: dims: [ 1 ] alone)"
        )
    return ConfigError(
        problem,
        expected=f"{example_inputs.NAME}.safetensors in the version folder, or a function"
        f" {example_inputs.NAME}() in model.py that returns a dict of tensors by input name",
        cure="Add one of them, or write the inputs and outputs into config.pbtxt.",
    )


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
        batched = specs.shares_rows(inputs)
        if batched:
            rows = inputs[0].dims[:1]
            twice = [
                dataclasses.replace(spec, dims=(2 * rows[0], *spec.dims[1:]))
                for spec in outputs
                if spec.dims[:1] == rows
            ]
            doubled: Item = {
                name: torch.cat([value, value])
                if isinstance(value, Tensor)
                else np.concatenate([value, value])
                for name, value in item.items()
            }
            with contextlib.suppress(ForwardError):
                batched = False
                batched = twice == [*self._call(doubled)]
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


def _annotated(hooks: Hooks) -> tuple[TensorSpec, ...]:
    """Return the inputs of one row, from the annotations of the first hook."""
    arguments = hooks.first.signature().arguments if hooks.first is not None else ()
    named = [argument for argument in arguments if argument.named]
    if not named or any(argument.type not in _ANNOTATED for argument in named):
        raise _no_inputs(
            "the hooks do not define the shapes of their inputs, as annotations like `bytes` and"
            " `str` do",
        )
    inputs = []
    for argument in named:
        dtype, dims = _ANNOTATED[argument.type]
        # The list that a hook for batches takes holds the rows.
        dims = dims if hooks.preprocess is not None else ()
        inputs.append(TensorSpec(argument.name, dtype, dims, optional=not argument.required))
    return tuple(inputs)


@dataclass(frozen=True, slots=True)
class _HookedTrial:
    """Runs of a loaded model with its hooks."""

    config: ModelConfig
    loaded: Loaded
    hooks: Hooks
    runtime: Runtime

    def of_example(self, example: Item) -> Schema:
        """Return the schema from runs with an example; as a batch, if the hooks accept it as one.

        Raises:
            ConfigError: the hooks cannot be run with it.
        """
        inputs = specs.of_values(example)
        if not specs.shares_rows(inputs):
            return self.run(inputs, 0, example)
        row, size = specs.row_specs(inputs, batched=True), specs.batch_size(self.loaded.rows.most)
        try:
            schema = self.run(row, size, example)
        except ConfigError:
            if self.hooks.per_batch:
                raise
            return self.run(inputs, 0, example)
        # Rows of an example, such as texts of different lengths, show which dims vary.
        for at in range(2 if inputs[0].dims[0] > 1 else 0):
            with contextlib.suppress(ConfigError):  # the model takes no single row
                single = {name: value[at : at + 1] for name, value in example.items()}
                schema = specs.with_varying(schema, self.run(row, size, single))
        return schema

    def run(
        self, inputs: Sequence[TensorSpec], max_batch_size: int, item: Item | None = None
    ) -> Schema:
        """Return the schema from a run with an item; None: with one that is made up.

        Raises:
            ConfigError: the hooks or the model fail.
        """
        config = dataclasses.replace(
            self.config, inputs=tuple(inputs), outputs=(), max_batch_size=max_batch_size
        )
        item = item or example_inputs.item(config, 2 if max_batch_size else None)
        signature, device = self.loaded.signature, self.runtime.device
        try:
            with self.runtime.guard():
                pipeline = HookedPipeline(config, signature, self.hooks, device)
                result, of_row = pipeline.run_unchecked(self.loaded.module, item)
        except Exception as error:  # the model's own code runs here
            known = isinstance(error, BackendError)
            raise ConfigError(
                "config.pbtxt lists no inputs or no outputs, and the hooks cannot be run to infer"
                f" them: {error if known else ForwardError(error, signature.name)}",
                cure=f"Put valid inputs beside the model, in a function {example_inputs.NAME}() or"
                f" {example_inputs.NAME}.safetensors, or write the outputs into config.pbtxt.",
            ) from error
        outputs = specs.of_result(result, "postprocess()")
        if not (max_batch_size and of_row):
            outputs = specs.row_specs(outputs, batched=max_batch_size > 0)
        return Schema(config.inputs, outputs, max_batch_size)
