"""The schema of a model, and the specs of tensors: names, types and dims."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from torch_py_backend.config import dtypes, pbtxt
from torch_py_backend.config.model_config import TensorSpec
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import ArtifactError, ConfigError, join_names
from torch_py_backend.pipeline.outputs import unchecked
from torch_py_backend.signature import results
from torch_py_backend.values import Value

# The max_batch_size of a model that takes any number of rows.
DEFAULT_BATCH_SIZE = 8
# A larger limit in an exported program stands for "any number of rows".
_MAX_BATCH_SIZE = 4096
_STRINGS = dtypes.from_triton("BYTES")


@dataclass(frozen=True, slots=True)
class Schema:
    """The tensors of a model, without the batch dimension if max_batch_size is above 0."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int


def schema_of(
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    max_rows: int | None,
    *,
    batched: bool,
) -> Schema:
    """Return the schema of tensors with all dims; `max_rows` limits the batch; None: no limit."""
    if max_rows is None or max_rows > _MAX_BATCH_SIZE:
        max_rows = DEFAULT_BATCH_SIZE
    return Schema(
        row_specs(inputs, batched=batched),
        row_specs(outputs, batched=batched),
        max_rows if batched else 0,
    )


def with_varying(schema: Schema, others: Sequence[TensorSpec]) -> Schema:
    """Return a schema with -1 for the dims of outputs that differ from those of another run."""
    pairs = list(zip(schema.outputs, others, strict=False))
    if len(schema.outputs) != len(others) or any(
        (spec.name, spec.dtype, len(spec.dims)) != (other.name, other.dtype, len(other.dims))
        for spec, other in pairs
    ):
        raise ConfigError(
            "config.pbtxt lists no outputs, and the model returns other outputs for other sizes:"
            f" {join_names(map(str, schema.outputs))}, or {join_names(map(str, others))}",
            cure="Write fixed sizes for the inputs, or write the outputs into config.pbtxt.",
        )
    outputs = []
    for spec, other in pairs:
        sizes = zip(spec.dims, other.dims, strict=True)
        dims = tuple(size if size == changed else -1 for size, changed in sizes)
        outputs.append(dataclasses.replace(spec, dims=dims))
    return dataclasses.replace(schema, outputs=tuple(outputs))


def entry_of(spec: TensorSpec) -> JsonObject:
    """Return a spec as an input or output of config.pbtxt."""
    optional = {"optional": True} if spec.optional else {}
    return {
        "name": spec.name,
        "data_type": spec.dtype.config,
        **pbtxt.dims_entry(spec.dims),
        **optional,
    }


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


def row_specs(specs: Iterable[TensorSpec], *, batched: bool) -> tuple[TensorSpec, ...]:
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
