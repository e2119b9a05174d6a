"""Inputs to try a model with: examples beside it, synthetic ones, initial states of sequences."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.config import pbtxt
from torch_py_backend.config.model_config import ModelConfig, Origin, State, TensorSpec
from torch_py_backend.errors import ArtifactError, summarize
from torch_py_backend.loading import discovery, python_source, weights
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.values import Item, Value, objects

NAME = "example_inputs"
TEXT = "text"  # the made-up string
# Two sizes for dimensions of -1, so that torch.compile marks them as dynamic. It specializes 1.
_VARIABLE, _SHRUNK = 8, 6
_NO_EXAMPLE: Mapping[str, Value] = {}


def find(config: ModelConfig, artifact: Artifact) -> Item | None:
    """Return the example inputs of a file beside the model, or a function in its code, or None."""
    path = config.version_folder / f"{NAME}.safetensors"
    if path.is_file():
        return weights.read(config, path)
    of_model = artifact.path if artifact.kind is ArtifactType.MODULE else None
    for source in filter(None, (artifact.hooks, of_model)):
        function = getattr(python_source.import_source(source), NAME, None)
        if function is not None:
            item: Item = python_source.call(source, NAME, lambda: dict(function()))  # noqa: B023
            for name, value in item.items():
                if not isinstance(value, Tensor):  # strings
                    item[name] = np.asarray(value, dtype=np.object_)
            return item
    return None


def item(
    config: ModelConfig,
    rows: int | None,
    *,
    shrunk: bool = False,
    without: Collection[str] = (),
    example: Mapping[str, Value] = _NO_EXAMPLE,
) -> Item:
    """Return one item, `without` some inputs; its dimensions of -1 may be `shrunk`.

    `rows` is the size of the batch dimension, if the model has one. Rows of the `example`, valid
    values by name, are repeated. States get those of a first step, other inputs synthetic ones.
    """
    generator = torch.Generator().manual_seed(0)
    multiple = 1
    for pad in (config.options.pad or {}).values():
        multiple = max(multiple, pad.get("multiple_of", 1))
    # The two sizes differ also after rounding up.
    sizes = (_VARIABLE, _SHRUNK) if multiple == 1 else (2 * multiple, multiple)
    values = initial_states(config, rows)
    for spec in config.inputs:
        if spec.name in example:
            values[spec.name] = _from_example(spec, rows, example[spec.name], shrunk=shrunk)
        elif spec.name not in values:
            values[spec.name] = _synthetic(spec, rows, sizes[shrunk], generator)
    return {spec.name: values[spec.name] for spec in config.inputs if spec.name not in without}


def requests(config: ModelConfig, item: Item) -> list[Item]:
    """Return the requests that form an item: with batch_input or batch_output one for each row."""
    if not config.concatenates or not config.max_batch_size:
        return [item]
    rows = range(len(next(iter(item.values()))))
    return [{name: value[at : at + 1] for name, value in item.items()} for at in rows]


def distinct_rows(value: Value) -> Value:
    """Return a tensor whose rows differ, if it is floating point: it may repeat one row."""
    # A row of one value may be an argument that takes one number for the whole batch.
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    if value[0].numel() == 1:
        return value
    factors = torch.linspace(1.0, 0.5, len(value)).to(value)
    while factors.ndim < value.ndim:
        factors = factors[..., None]
    return value * factors


def fits(config: ModelConfig, spec: TensorSpec, value: Value) -> bool:
    """Return whether an example is a valid value of this input, with at least one row."""
    dims = spec.dims
    if config.max_batch_size:
        dims = (-1, *dims)
    dtype = str(value.dtype) if isinstance(value, Tensor) else "torch.None"
    has_values = pbtxt.fits(value.shape, dims) and 0 not in value.shape
    return dtype == f"torch.{spec.dtype.torch}" and has_values


def _from_example(
    spec: TensorSpec,
    rows: int | None,
    value: Value,
    *,
    shrunk: bool,
) -> Value:
    if rows is not None:
        value = value[np.arange(rows) % value.shape[0]]
    if shrunk:
        for axis, dim in enumerate(spec.dims, value.ndim - len(spec.dims)):
            if dim == -1:
                size = value.shape[axis]
                # A half, which models that divide sizes by a power of two may take; of 3 not 1.
                size = max(1, size // 2, min(size - 1, 2))
                value = value[(slice(None),) * axis + (slice(size),)]
    return value.contiguous() if isinstance(value, Tensor) else value


def _synthetic(
    spec: TensorSpec,
    rows: int | None,
    variable: int,
    generator: torch.Generator,
) -> Value:
    dims = [variable if dim == -1 else dim for dim in spec.dims]
    shape = dims if rows is None else [rows, *dims]
    if spec.dtype.torch is None:
        return np.full(shape, TEXT.encode(), dtype=np.object_)
    dtype: torch.dtype = getattr(torch, spec.dtype.torch)
    if dtype.is_floating_point and spec.origin is not Origin.CONTROL:
        # A row of one value has the same in all rows, because the argument may take one number.
        drawn = dims if math.prod(dims) == 1 else shape
        return torch.rand(drawn, generator=generator).to(dtype).expand(shape).contiguous()
    # 1 is a valid ID, mask and length for nearly all models; a length of 0 is not. As a control
    # input, 1 means that the request is the first and last of its sequence.
    return torch.ones(shape, dtype=dtype)


def initial_states(config: ModelConfig, rows: int | None) -> Item:
    """Return the states for the first step, with a batch dimension of `rows`, or none."""
    states: Item = {}
    for state in config.states:
        value = _initial_state(config, state)
        states[state.input] = value if rows is None else value[None][[0] * rows]
    return states


def _initial_state(config: ModelConfig, state: State) -> Value:
    dtype: torch.dtype | None = getattr(torch, state.dtype.torch or "", None)
    if state.file is None:
        if dtype is None:
            return np.full(state.initial, b"", dtype=np.object_)
        return torch.zeros(state.initial, dtype=dtype)
    folder = config.folder / "initial_state"
    role = f"the data_file of the state '{state.input}'"
    path = discovery.inside(config, role, folder, state.file)
    count = math.prod(state.initial)
    try:
        content = path.read_bytes()
        if dtype is not None:
            numbers = torch.frombuffer(bytearray(content), dtype=dtype, count=count)
            return numbers.reshape(state.initial)
        texts = []  # each follows its length in four bytes
        while len(content) >= (end := 4 + int.from_bytes(content[:4], "little")):
            texts.append(content[4:end])
            content = content[end:]
        return objects(texts[:count]).reshape(state.initial)
    except (OSError, ValueError) as error:  # the file is missing, or too short
        raise ArtifactError(f"{role} cannot be read: {summarize(error)}") from None
