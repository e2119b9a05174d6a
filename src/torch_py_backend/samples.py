"""Made-up requests for a config: to try a model before the first real one comes."""

from __future__ import annotations

import numpy as np
import torch

from torch_py_backend.batching import Item, Value
from torch_py_backend.config import ModelConfig, TensorSpec


def item(
    config: ModelConfig, rows: int | None, variable: int = 1, *, optional: bool = True
) -> Item:
    """One item.

    Args:
        config: the model's config.
        rows: the size of the batch dimension; None: the model has none.
        variable: the size of dimensions of -1.
        optional: also the inputs that may be left out.
    """
    generator = torch.Generator().manual_seed(0)
    return {
        spec.name: _value(spec, rows, variable, generator)
        for spec in config.inputs
        if optional or not spec.optional
    }


def _value(spec: TensorSpec, rows: int | None, variable: int, generator: torch.Generator) -> Value:
    dims = [variable if dim == -1 else dim for dim in spec.dims]
    shape = dims if rows is None else [rows, *dims]
    if spec.dtype.torch is None:
        return np.full(shape, b"text", dtype=np.object_)
    dtype: torch.dtype = getattr(torch, spec.dtype.torch)
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator).to(dtype)
    # An id, a mask and a length of 1 are valid nearly everywhere; 0 is no length.
    return torch.ones(shape, dtype=dtype)
