"""Infers the schema of a model: names, types and dims of its tensors, and its max_batch_size.

The functions run in a child process, because they run the model's code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from torch_py_backend.config import dtypes, model_config, pbtxt
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.engine import runtime
from torch_py_backend.errors import (
    ArtifactError,
    BackendError,
    ConfigError,
    ForwardError,
    InputError,
    OutputError,
)
from torch_py_backend.loading import aotinductor, discovery, example_inputs, exported, registry
from torch_py_backend.loading import hooks as user_hooks
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.loading.hooks import Hooks
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.pipeline.hooks import HookedPipeline
from torch_py_backend.pipeline.outputs import unchecked
from torch_py_backend.signature import results
from torch_py_backend.signature.arguments import Signature
from torch_py_backend.values import Item, Value

# The max_batch_size of a model that takes any number of rows.
DEFAULT_BATCH_SIZE = 8
# A larger limit in an exported program stands for "any number of rows".
_MAX_BATCH_SIZE = 4096
_STRINGS = dtypes.from_triton("BYTES")
# Models with these keys in config.pbtxt, and decoupled ones, are not run.
_NOT_RUN = ("batch_input", "batch_output", "sequence_batching")


def describe(arguments: Mapping[str, str], *, finds_batch: bool = False) -> JsonObject:
    """Return the schema of a model as JSON.

    Without an example, the values of the inputs in config.pbtxt are made up. Output dims that
    differ between sizes of the inputs are -1.

    Args:
        arguments: Triton's arguments; the config may lack inputs and outputs.
        finds_batch: try whether a model with listed inputs has a batch dimension.
    """
    _refuse_not_run(json.loads(arguments["model_config"]))
    config = model_config.parse(arguments, complete=False)
    listed = model_config.listed_inputs(arguments)
    batched = None  # it is found out
    if config.max_batch_size or (listed and not finds_batch):
        batched = config.max_batch_size > 0
    artifact = discovery.find(config)
    # The batch dimension is not known yet; hooks for batches need one.
    with_batch = dataclasses.replace(config, max_batch_size=config.max_batch_size or 1)
    hooks = user_hooks.load(with_batch, artifact)
    if hooks is None and artifact.kind is ArtifactType.EXPORTED:
        registry.import_beside(artifact)
        return _from_program(artifact.path, batched=batched)
    device = _device(artifact)
    loaded = registry.load(artifact, config, device)
    example = example_inputs.find(config, artifact)
    if not listed and example is None:
        raise ConfigError(
            f"config.pbtxt lists no inputs, and {loaded.kind.value} does not define the shapes that"
            f" {hooks or loaded.signature} takes",
            expected=f"{example_inputs.NAME}.safetensors in the version folder, or a function"
            f" {example_inputs.NAME}() in model.py or hooks.py that returns a dict of tensors by"
            " input name",
            cure="Add one of them, or write the inputs and outputs into config.pbtxt. `init` takes"
            " them as --example FILE, or --input NAME:TYPE:DIMS for each.",
        )
    run = partial(_run, config, loaded, hooks or Hooks(), device)
    items = partial(_items, config, listed, example or {}, hooked=hooks is not None)
    try:
        if batched is None:
            rows_alike = partial(run, batched=True)
            per_batch = hooks is not None and hooks.per_batch
            batched = bool(per_batch) or is_batch(rows_alike, items(batched=True)[0])
        item, *others = items(batched=batched)
        outputs = run(item, batched=batched)
    except ForwardError as error:
        if example is not None:
            raise
        raise ConfigError(
            "config.pbtxt lists no outputs, and the model fails with made-up values for its inputs:"
            f" {error}",
            cure=f"Correct the inputs; or put valid values beside the model, in"
            f" {example_inputs.NAME}.safetensors or a function {example_inputs.NAME}(); or write"
            " the outputs into config.pbtxt.",
        ) from error
    for other in others:
        with contextlib.suppress(ForwardError, InputError, OutputError):
            outputs = _with_varying(outputs, run(other, batched=batched))
    return _schema(of_values(item), outputs, loaded.rows.most, batched=batched)


def _refuse_not_run(document: JsonObject) -> None:
    """Raise ConfigError for a model whose tensors are not inferred."""
    decoupled = document.get("model_transaction_policy", {}).get("decoupled")
    if decoupled or any(document.get(key) for key in _NOT_RUN):
        raise ConfigError(
            "config.pbtxt lacks inputs or outputs, which are not inferred for ragged inputs and"
            " outputs, sequences and decoupled models",
            expected="data_type and dims of each input and output",
        )


def signature(arguments: Mapping[str, str]) -> Signature:
    """Return the signature of a model, which is not called."""
    config = model_config.parse(arguments, complete=False)
    artifact = discovery.find(config)
    return registry.load(artifact, config, _device(artifact)).signature


def _device(artifact: Artifact) -> torch.device:
    """Return the device of a trial, which happens before an instance has one."""
    packaged = artifact.kind is ArtifactType.AOTI
    return aotinductor.device_of(artifact.path) if packaged else torch.device("cpu")


def _from_program(path: Path, *, batched: bool | None) -> JsonObject:
    """Return the schema that an exported program declares; sizes that are not fixed are -1."""
    *tensors, rows = exported.describe(path)
    inputs, outputs = (of_values(values) for values in tensors)
    if batched is None:  # a fixed first dimension is not taken for a batch
        batched = {spec.dims[:1] for spec in (*inputs, *outputs)} == {(-1,)}
    return _schema(inputs, outputs, rows.most, batched=batched)


def _items(
    config: ModelConfig,
    listed: Sequence[TensorSpec],
    example: Item,
    *,
    batched: bool,
    hooked: bool,
) -> list[Item]:
    """Return inputs to run a model with, of several sizes if the model may take them."""
    items = [example]
    if listed:
        rows = 2 if batched else None
        config = dataclasses.replace(config, inputs=tuple(listed), max_batch_size=rows or 0)
        varies = any(-1 in spec.dims for spec in listed)
        items = [
            example_inputs.item(config, rows, shrunk=shrunk, example=example)
            for shrunk in ((False, True) if varies else (False,))
        ]
    if batched and example and hooked:
        # Rows of an example, such as texts of different lengths, show which dims vary.
        for row in (slice(0, 1), slice(1, 2)):
            items.append({name: value[row] for name, value in items[0].items()})
    return items


def _run(
    config: ModelConfig,
    loaded: Loaded,
    hooks: Hooks,
    device: torch.device,
    item: Item,
    *,
    batched: bool,
) -> tuple[TensorSpec, ...]:
    """Return the specs of the outputs for an item, with all dims."""
    inputs = of_values(item)
    rows = inputs[0].dims[0] if batched and inputs and inputs[0].dims else 0
    specs = _row_specs(inputs, batched=rows > 0)
    config = dataclasses.replace(config, inputs=specs, outputs=(), max_batch_size=rows)
    try:
        with runtime.mode(config.options):
            pipeline = HookedPipeline(config, loaded.signature, hooks, device)
            result, of_row = pipeline.run_unchecked(loaded.module, item)
    except BackendError:
        raise
    except Exception as error:  # the model's own code runs here
        raise ForwardError(error, loaded.signature.name) from error
    outputs = of_result(result, "forward()" if not hooks.defined else "postprocess()")
    if rows and of_row:
        return tuple(dataclasses.replace(spec, dims=(rows, *spec.dims)) for spec in outputs)
    return outputs


def is_batch(run: Callable[[Item], Sequence[TensorSpec]], item: Item) -> bool:
    """Return whether dimension 0, and no other, doubles in every output if the rows do.

    `run` returns the outputs of the model for an item, with all dims.
    """
    sizes = {value.shape[0] if value.ndim else 0 for value in item.values()}
    if len(sizes) != 1 or 0 in sizes:
        return False
    (rows,) = sizes
    twice = [*range(rows)] * 2
    doubled: Item = {name: value[twice] for name, value in item.items()}
    try:
        outputs, of_doubled = run(item), run(doubled)
    except BackendError:  # it takes no other number of rows
        return False
    expected = [
        dataclasses.replace(spec, dims=(2 * rows, *spec.dims[1:]))
        for spec in outputs
        if spec.dims[:1] == (rows,)
    ]
    return expected == [*of_doubled]


def _schema(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_rows: int | None,
    *,
    batched: bool,
) -> JsonObject:
    """Return the schema of tensors with all dims; `max_rows` limits the batch; None: no limit."""
    if max_rows is None or max_rows > _MAX_BATCH_SIZE:
        max_rows = DEFAULT_BATCH_SIZE
    return {
        "input": entries(inputs, batched=batched),
        "output": entries(outputs, batched=batched),
        "max_batch_size": max_rows if batched else 0,
    }


def _with_varying(
    outputs: Sequence[TensorSpec], others: Sequence[TensorSpec]
) -> tuple[TensorSpec, ...]:
    """Return outputs with -1 for the dims that differ from those of another run."""
    other_dims = {spec.name: spec.dims for spec in others}
    varying = []
    for spec in outputs:
        sizes = zip(spec.dims, other_dims.get(spec.name, ()), strict=False)
        differ = {dim for dim, (size, other) in enumerate(sizes) if size != other}
        varying.append(with_any_size(spec, differ))
    return tuple(varying)


def with_any_size(spec: TensorSpec, dims: Collection[int]) -> TensorSpec:
    """Return a spec with -1 for some of its dims."""
    sizes = (-1 if dim in dims else size for dim, size in enumerate(spec.dims))
    return dataclasses.replace(spec, dims=tuple(sizes))


def entries(specs: Iterable[TensorSpec], *, batched: bool) -> list[JsonObject]:
    """Return tensors with all dims as inputs or outputs of config.pbtxt."""
    return [
        {"name": spec.name, "data_type": spec.dtype.config, **pbtxt.dims_entry(spec.dims)}
        for spec in _row_specs(specs, batched=batched)
    ]


def of_values(values: Mapping[str, Value]) -> tuple[TensorSpec, ...]:
    """Return the specs of values, with all dims; -1 for a size that a program does not fix."""
    specs = []
    for name, value in values.items():
        dims = tuple(size if isinstance(size, int) else -1 for size in value.shape)
        try:
            dtype = dtypes.from_torch(value.dtype) if isinstance(value, Tensor) else _STRINGS
        except KeyError:
            raise ArtifactError(
                f"tensor '{name}' is {str(value.dtype).removeprefix('torch.')}, which no request"
                " can carry",
                expected=", ".join(row.torch for row in dtypes.TABLE if row.torch),
            ) from None
        specs.append(TensorSpec(name, dtype, dims))
    return tuple(specs)


def _row_specs(
    specs: Iterable[TensorSpec],
    *,
    batched: bool,
) -> tuple[TensorSpec, ...]:
    """Return specs without the batch dimension, if there is one."""
    # Without a batch dimension Triton allows no empty dims: a scalar is a list of one value.
    return tuple(
        dataclasses.replace(spec, dims=spec.dims[1:] if batched else spec.dims or (1,))
        for spec in specs
    )


def of_result(result: object, of: str) -> tuple[TensorSpec, ...]:
    """Return the specs of the leaves of a result of the function `of`, with all dims."""
    names = results.leaf_names(result)
    parts = results.bind_outputs(names, result, of)(result)
    named = zip(names, parts, strict=True)
    return of_values({name: unchecked(name, part) for name, part in named})
