"""Example inputs of a module in memory: their names, their entries in config.pbtxt, the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend.autocomplete import schema
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import SaveError, a_type
from torch_py_backend.signature import introspection
from torch_py_backend.signature.arguments import path_text
from torch_py_backend.signature.results import named_leaves
from torch_py_backend.values import Item, Value


class Example(NamedTuple):
    """Valid inputs of a module."""

    item: Item  # the inputs of a request by name; strings are arrays of objects
    config: JsonObject  # `input` and `max_batch_size` of config.pbtxt
    arguments: Any = None  # those of forward() as a tree; None: hooks make them
    outputs: Item | None = None  # those of the module, on the CPU; None with hooks


def from_arguments(
    module: nn.Module, example_inputs: object, max_batch_size: int | None, dynamic_shapes: Any
) -> Example:
    """Return the example of a module without hooks, from the arguments of `save_model`."""
    signature = introspection.from_function(module.forward)
    if isinstance(example_inputs, Mapping):
        arguments = dict(example_inputs)
    elif isinstance(example_inputs, Tensor | tuple):
        args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
        arguments = inspect.signature(module.forward).bind(*args).arguments
    else:
        raise SaveError(
            f"example_inputs is {a_type(example_inputs)}",
            expected=f"valid arguments of {signature}: a tensor, a tuple of arguments, or a dict of"
            " arguments by name",
        )
    if isinstance(dynamic_shapes, Sequence):
        dynamic_shapes = dict(zip(arguments, dynamic_shapes, strict=False))
    leaves, tree = pytree.tree_flatten_with_path(arguments)
    # The keys of a dict that is the only argument are names of inputs.
    is_dict = signature.container_argument([]) is not None and {len(p) for p, _ in leaves} == {2}
    item: Item = {}
    resized: Item = {}
    for path, value in leaves:
        keys = [introspection.path_key(key) for key in path]
        is_key = is_dict and isinstance(keys[-1], str)
        name = str(keys[-1]) if len(keys) == 1 + is_key else path_text("KWARGS", keys)
        if not isinstance(value, Tensor):
            raise SaveError(
                f"the value of '{name}' in example_inputs is {a_type(value)}",
                expected="a tensor",
                cure="Leave it out if it has a default.",
            )
        item[name], resized[name] = value, _resized(value, dynamic_shapes, keys)

    def run(item: Mapping[str, Value]) -> Item:
        # Copied, because forward() may change them in place.
        copies = [torch.as_tensor(value).clone() for value in item.values()]
        leaves = named_leaves(module(**pytree.tree_unflatten(copies, tree))).items()
        return {
            name: torch.atleast_1d(leaf.detach().cpu())
            for name, leaf in leaves
            if isinstance(leaf, Tensor)
        }

    outputs = run(item)
    if max_batch_size is None:
        max_batch_size = _default_size(item) if schema.is_batch(run, item) else 0
    if not max_batch_size:  # Triton has no tensors without dimensions
        item = {name: torch.atleast_1d(torch.as_tensor(value)) for name, value in item.items()}
    entries = schema.entries(item, resized, batched=max_batch_size > 0)
    return Example(item, {"input": entries, "max_batch_size": max_batch_size}, tree, outputs)


def from_requests(
    example_inputs: object, max_batch_size: int | None, dynamic_shapes: Any
) -> Example:
    """Return the example of a module with hooks, whose inputs are those of a request."""
    if not isinstance(example_inputs, Mapping) or not example_inputs:
        raise SaveError(
            f"example_inputs is {a_type(example_inputs)}, and the model has hooks",
            expected="a dict of the inputs of a request by name",
        )
    shape = (-1,) if max_batch_size == 0 else (-1, 1)
    item: Item = {
        name: value.detach().cpu()
        if isinstance(value, Tensor)
        else np.array(value, dtype=np.object_).reshape(shape)
        for name, value in example_inputs.items()
    }
    if max_batch_size is None:
        max_batch_size = _default_size(item)
    if isinstance(dynamic_shapes, Sequence):
        dynamic_shapes = dict(zip(item, dynamic_shapes, strict=False))
    resized = {name: _resized(value, dynamic_shapes, [name]) for name, value in item.items()}
    entries = schema.entries(item, resized, batched=max_batch_size > 0)
    return Example(item, {"input": entries, "max_batch_size": max_batch_size})


def _default_size(item: Item) -> int:
    return max(schema.DEFAULT_BATCH_SIZE, *next(iter(item.values())).shape[:1])


def _resized(value: Value, shapes: Any, keys: Sequence[int | str]) -> Value:
    """Return an input without values in the dimensions that `dynamic_shapes` does not fix."""
    for key in keys:
        shapes = shapes.get(key) if isinstance(shapes, Mapping) else shapes and shapes[key]
    sizes = shapes.items() if isinstance(shapes, Mapping) else enumerate(shapes or ())
    fixed = (None, torch.export.Dim.STATIC)
    for dim, size in sizes:
        if size not in fixed and type(size) is not int and dim < value.ndim:
            value = value[(slice(None),) * (dim % value.ndim) + (slice(0),)]
    return value
