"""Made-up requests for a config: to try a model before the first real one comes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.batching.gather_scatter import Item, Value
from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.sequences import initial_states

# Sizes for dimensions of -1: above 1, which torch.compile takes for a constant, and two, so that
# it learns that they vary.
_VARIABLE, _SHRUNK = 8, 6
_NOTHING: Mapping[str, Value] = {}


def item(
    config: ModelConfig,
    rows: int | None,
    *,
    shrunk: bool = False,
    without: Collection[str] = (),
    example: Mapping[str, Value] = _NOTHING,
) -> Item:
    """One item.

    Args:
        config: the model's config.
        rows: the size of the batch dimension; None: the model has none.
        shrunk: with a quarter less in dimensions of -1.
        without: inputs to leave out.
        example: valid values by name, with a batch dimension where the model has one; they are
            repeated to make up the rows. States are those of a first step, other inputs get
            made-up values.

    Raises:
        ArtifactError: a file of initial states cannot be read.
    """
    generator = torch.Generator().manual_seed(0)
    begun = initial_states.find(config, rows)
    return {
        spec.name: _from_example(spec, rows, example[spec.name], shrunk=shrunk)
        if spec.name in example
        else begun[spec.name]
        if spec.name in begun
        else _made_up(spec, rows, _variable(config, shrunk=shrunk), generator)
        for spec in config.inputs
        if spec.name not in without
    }


def requests(config: ModelConfig, item: Item) -> list[Item]:
    """Return the requests that bring an item: with batch_input or batch_output one for each row.

    A model that is given counts of requests returns a row for each, and fails with others.
    """
    if not config.concatenates or not config.max_batch_size:
        return [item]
    rows = next(iter(item.values())).shape[0]
    return [{name: value[at : at + 1] for name, value in item.items()} for at in range(rows)]


def _variable(config: ModelConfig, *, shrunk: bool) -> int:
    """The size for dimensions of -1: two that differ also where they are rounded up."""
    pads = (config.options.pad or {}).values()
    multiple: int = max((how.get("multiple_of", 1) for how in pads), default=1)
    if multiple > 1:
        return multiple if shrunk else 2 * multiple
    return _SHRUNK if shrunk else _VARIABLE


def fits(config: ModelConfig, spec: TensorSpec, value: Value) -> bool:
    """Whether an example is a value of this input, of at least one row."""
    dims = (-1, *spec.dims) if config.max_batch_size else spec.dims
    dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else None
    return (
        dtype == spec.dtype.torch
        and len(value.shape) == len(dims)
        and all(
            wanted in (-1, size) and size > 0
            for size, wanted in zip(value.shape, dims, strict=True)
        )
    )


def _from_example(spec: TensorSpec, rows: int | None, value: Value, *, shrunk: bool) -> Value:
    if rows is not None:
        value = value[np.arange(rows) % value.shape[0]]
    if shrunk:
        for axis, dim in enumerate(spec.dims, value.ndim - len(spec.dims)):
            size = max(1, value.shape[axis] * _SHRUNK // _VARIABLE)
            value = value[(slice(None),) * axis + (slice(size),)] if dim == -1 else value
    return value.contiguous() if isinstance(value, Tensor) else value


def _made_up(
    spec: TensorSpec, rows: int | None, variable: int, generator: torch.Generator
) -> Value:
    dims = [variable if dim == -1 else dim for dim in spec.dims]
    shape = dims if rows is None else [rows, *dims]
    if spec.dtype.torch is None:
        return np.full(shape, b"text", dtype=np.object_)
    dtype: torch.dtype = getattr(torch, spec.dtype.torch)
    if dtype.is_floating_point and spec.origin is not Origin.CONTROL:
        # A row's only value is that of all rows: an argument may take it as one number.
        drawn = dims if math.prod(dims) == 1 else shape
        return torch.rand(drawn, generator=generator).to(dtype).expand(shape).contiguous()
    # An id, a mask and a length of 1 are valid nearly everywhere; 0 is no length. Controls say of
    # a sequence that it is the only step.
    return torch.ones(shape, dtype=dtype)
