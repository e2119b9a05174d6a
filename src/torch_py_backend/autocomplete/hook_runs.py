"""The schema of a model with hooks: inputs from an example, the config or annotations; outputs from
trial runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence

import torch

from torch_py_backend.autocomplete import specs
from torch_py_backend.autocomplete.specs import Schema
from torch_py_backend.config import dtypes
from torch_py_backend.config.dtypes import DType
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.engine import runtime
from torch_py_backend.errors import BackendError, ConfigError, ForwardError
from torch_py_backend.loading import example_inputs, registry
from torch_py_backend.loading.discovery import Artifact
from torch_py_backend.loading.hooks import Hooks
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.pipeline.hooks import HookedPipeline
from torch_py_backend.signature.arguments import ArgumentType
from torch_py_backend.values import Item

log = logging.getLogger(__name__)

_BYTES = dtypes.from_triton("BYTES")
# The types and dims of annotations, for one row.
ANNOTATED: Mapping[ArgumentType, tuple[DType, tuple[int, ...]]] = {
    ArgumentType.INT: (dtypes.from_triton("INT64"), ()),
    ArgumentType.FLOAT: (dtypes.from_triton("FP32"), ()),
    ArgumentType.BOOL: (dtypes.from_triton("BOOL"), ()),
    ArgumentType.STR: (_BYTES, ()),
    ArgumentType.RAW: (_BYTES, ()),
    ArgumentType.STRINGS: (_BYTES, (-1,)),
    ArgumentType.BYTES: (_BYTES, (-1,)),
}


def infer(
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
    inputs = listed if listed or example is not None else _annotated(hooks)
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
                varied = run_hooks(settings, loaded, hooks, single, device)
                schema = specs.with_varying(schema, varied)
        return schema

    if example is None:
        return run(inputs, config.max_batch_size if listed else specs.DEFAULT_BATCH_SIZE)
    inputs = specs.of_values(example)
    if len({spec.dims[:1] for spec in inputs}) == 1 and all(spec.dims for spec in inputs):
        try:
            return run(specs.row_specs(inputs, batched=True), specs.batch_size(loaded.rows.most))
        except ConfigError as error:
            if hooks.per_batch:
                raise
            log.debug("%s It is tried without a batch dimension.", error)
    return run(inputs, 0)


def _annotated(hooks: Hooks) -> tuple[TensorSpec, ...]:
    """Return the inputs of one row, from the annotations of the first hook."""
    hook = hooks.preprocess or hooks.preprocess_batch
    arguments = hook.signature().arguments if hook is not None else ()
    named = [argument for argument in arguments if argument.named]
    if not named or any(argument.type not in ANNOTATED for argument in named):
        raise specs.no_example(
            "the hooks do not define the shapes of their inputs,"
            " as annotations like `bytes` and `str` do",
        )
    inputs = []
    for argument in named:
        dtype, dims = ANNOTATED[argument.type]
        # The list that a hook for batches takes holds the rows.
        dims = dims if hook is hooks.preprocess else ()
        inputs.append(TensorSpec(argument.name, dtype, dims, optional=not argument.required))
    return tuple(inputs)


def run_hooks(
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
