"""Infers the inputs, outputs and max_batch_size of a config, in a child process with its model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from torch_py_backend.config import dtypes, model_config, pbtxt
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.engine import runtime
from torch_py_backend.errors import (
    BackendError,
    ConfigError,
    ForwardError,
    InputError,
    OutputError,
)
from torch_py_backend.loading import discovery, example_inputs, registry
from torch_py_backend.loading import hooks as user_hooks
from torch_py_backend.loading.hooks import Hooks
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.pipeline.hooks import HookedPipeline
from torch_py_backend.pipeline.outputs import to_value
from torch_py_backend.signature import results
from torch_py_backend.values import Item, Value

DEFAULT_BATCH_SIZE = 8  # of a model that takes any number of rows
_MAX_BATCH_SIZE = 4096  # a larger limit of an exported program stands for any number of rows
_EXAMPLE = (
    f"{example_inputs.NAME}.safetensors in the version folder, or a function"
    f" {example_inputs.NAME}() in model.py or hooks.py"
)


def describe(
    arguments: Mapping[str, str],
    *,
    finds_batch: bool = False,
) -> JsonObject:
    """Return the inputs, outputs and max_batch_size of a config; what it lists is kept.

    With `finds_batch`, a model with listed inputs is tried for a batch dimension, too.
    """
    document = json.loads(arguments["model_config"])
    config = model_config.parse(arguments, complete=False)
    ragged = document.get("batch_input") or document.get("batch_output")
    if ragged or config.sequencing is not None or config.decoupled:
        raise ConfigError(
            "config.pbtxt lacks inputs or outputs, which are not inferred for ragged inputs and"
            " outputs, sequences and decoupled models",
            expected="data_type and dims of each input and output",
        )
    batched = None  # it is found out
    if config.max_batch_size or (document.get("input") and not finds_batch):
        batched = config.max_batch_size > 0
    artifact = discovery.find(config)
    # The batch dimension is not known yet; hooks for batches need one.
    with_batch = dataclasses.replace(config, max_batch_size=config.max_batch_size or 1)
    hooks = user_hooks.load(with_batch, artifact)
    device = torch.device("cpu")
    if torch.cuda.is_available() and discovery.is_cuda_package(artifact.path):
        device = torch.device("cuda", torch.cuda.current_device())  # it runs on no other device
    loaded = registry.load(artifact, with_batch, device)
    if hooks is None and loaded.traced is not None:
        inputs, *outputs = loaded.traced
        if batched is None:  # a fixed first dimension is not taken for a batch
            values = (*inputs.values(), *outputs[0].values())
            batched = all(v.ndim and not isinstance(v.shape[0], int) for v in values)
    else:
        inputs, outputs, batched = _try(
            config, document, loaded, hooks or Hooks(), device, batched=batched
        )
    most = loaded.rows.most
    if most is None or most > _MAX_BATCH_SIZE:
        most = DEFAULT_BATCH_SIZE
    inferred = {
        "input": entries(inputs, batched=batched),
        "output": entries(*outputs, batched=batched),
        "max_batch_size": most if batched else 0,
    }
    return inferred | {key: document[key] for key in inferred if document.get(key)}


def _try(
    config: ModelConfig,
    document: Document,
    loaded: Loaded,
    hooks: Hooks,
    device: torch.device,
    *,
    batched: bool | None,
) -> tuple[Item, list[Item], bool]:
    """Return inputs of a model, its outputs for several sizes, and whether they have a batch."""
    example = example_inputs.find(config, loaded.artifact)
    if not document.get("input") and example is None:
        raise ConfigError(
            f"no inputs are listed, and {loaded.kind.value} does not define their shapes",
            expected=f"{_EXAMPLE} that returns a dict of tensors by input name",
            cure="Add one of them, or write the inputs and outputs into config.pbtxt. `init` copies"
            " the file beside the model, or takes --input NAME:TYPE:DIMS for each.",
        )
    run = partial(_run, config, loaded, hooks, device)
    items = partial(_items, config, document, example or {}, hooked=any(hooks))
    try:
        if batched is None:
            rows_alike = partial(run, batched=True)
            batched = bool(hooks.per_batch) or is_batch(rows_alike, items(batched=True)[0])
        item, *others = items(batched=batched)
        outputs = [run(item, batched=batched)]
    except ForwardError as error:
        if example is not None:
            raise
        raise ConfigError(
            "config.pbtxt lists no outputs, and the model fails with made-up values for its inputs:"
            f" {error}",
            cure=f"Correct the inputs, add {_EXAMPLE}, or write the outputs into config.pbtxt.",
        ) from error
    for other in others:
        with contextlib.suppress(ForwardError, InputError, OutputError):
            outputs.append(run(other, batched=batched))
    return item, outputs, batched


def _items(
    config: ModelConfig,
    document: Document,
    example: Item,
    *,
    batched: bool,
    hooked: bool,
) -> list[Item]:
    """Return inputs to run a model with, of several sizes if the model may take them."""
    items = [example]
    if document.get("input"):
        rows = 2 if batched else None
        listed = model_config.specs("input", document)
        config = dataclasses.replace(config, inputs=listed, max_batch_size=rows or 0)
        items = [
            example_inputs.item(config, rows, shrunk=shrunk, example=example)
            for shrunk in (False, True)
        ]
    if batched and hooked and all(map(len, items[0].values())):
        # Rows alone, such as texts of different lengths, show which dims vary.
        for at in (0, 1):
            items.append({name: value[[at % len(value)]] for name, value in items[0].items()})
    return items


def _run(
    config: ModelConfig,
    loaded: Loaded,
    hooks: Hooks,
    device: torch.device,
    item: Item,
    *,
    batched: bool,
) -> Item:
    """Return the outputs for an item by name, with all dims."""
    sizes = [value.shape[0] for value in item.values() if value.ndim]
    rows = sizes[0] if batched and sizes else 0
    listed = model_config.specs("input", {"input": entries(item, batched=rows > 0)})
    options = dataclasses.replace(config.options, optimize=())  # the types are those of the file
    config = dataclasses.replace(
        config, inputs=listed, outputs=(), max_batch_size=rows, options=options
    )
    try:
        with runtime.mode(config.options):
            pipeline = HookedPipeline(config, loaded.signature, hooks, device)
            result = pipeline.run_unchecked(loaded.module, item)
    except BackendError:
        raise
    except Exception as error:  # the model's own code runs here
        raise ForwardError(error, loaded.signature.name) from error
    leaves = results.named_leaves(result)
    outputs = {name: to_value(name, leaf) for name, leaf in leaves.items()}
    if rows and hooks.postprocess is not None:
        return {name: value[None][[0] * rows] for name, value in outputs.items()}
    return outputs


def is_batch(run: Callable[[Item], Item], item: Item) -> bool:
    """Return whether dimension 0, and no other, of every output of `run` doubles with the rows."""
    sizes = {value.shape[0] if value.ndim else 0 for value in item.values()}
    if len(sizes) != 1 or 0 in sizes:
        return False
    (rows,) = sizes
    try:
        outputs = run(item)
        doubled = run({name: value[[*range(rows)] * 2] for name, value in item.items()})
    except Exception:  # it takes no other number of rows
        return False
    return outputs.keys() == doubled.keys() and all(
        value.shape[:1] == (rows,) and doubled[name].shape == (2 * rows, *value.shape[1:])
        for name, value in outputs.items()
    )


def entries(
    values: Mapping[str, Value], *others: Mapping[str, Value], batched: bool
) -> list[JsonObject]:
    """Return inputs or outputs of config.pbtxt; -1 for sizes that differ in others, or vary."""
    listed = []
    for name, value in values.items():
        is_tensor = isinstance(value, Tensor)
        data_type = dtypes.config_name(value.dtype) if is_tensor else "TYPE_STRING"
        dims = [size if isinstance(size, int) else -1 for size in value.shape]
        for other in others:
            sizes = zip(dims, other.get(name, value).shape, strict=False)
            dims = [dim if dim == size else -1 for dim, size in sizes]
        # Without a batch dimension Triton allows no empty dims: a scalar is a list of one value.
        dims = dims[1:] if batched else dims or [1]
        listed.append({"name": name, "data_type": data_type, **pbtxt.dims_entry(dims)})
    return listed
