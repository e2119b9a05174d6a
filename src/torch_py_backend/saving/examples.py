"""Example inputs of a module in memory: their names, their entries in config.pbtxt, the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from torch_py_backend.autocomplete import schema
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.errors import SaveError, a_type, summarize
from torch_py_backend.model_folders import artifact_files
from torch_py_backend.signature import introspection
from torch_py_backend.signature.arguments import path_text
from torch_py_backend.signature.results import bind_outputs, leaf_names
from torch_py_backend.values import Item, Value

_KINDS = "a tensor, a tuple of arguments, or a dict of arguments by name"


@dataclass(frozen=True, slots=True)
class Example:
    """Valid inputs of a module.

    Attributes:
        item: the inputs of a request by name; strings are arrays of objects.
        entries: the inputs in config.pbtxt.
        max_batch_size: that of config.pbtxt.
        arguments: the tree of forward()'s arguments by name, whose leaves are those of the item;
            None: hooks make them from the item.
        outputs: those of the module, on the CPU; empty with hooks.
    """

    item: Item
    entries: list[JsonObject]
    max_batch_size: int
    arguments: TreeSpec | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)


def from_arguments(
    module: nn.Module, example_inputs: object, max_batch_size: int | None, dynamic_shapes: Any
) -> Example:
    """Return the example of a module without hooks, from the arguments of `save_model`."""
    arguments = _by_name(module, example_inputs)
    if isinstance(dynamic_shapes, Sequence):
        dynamic_shapes = dict(zip(arguments, dynamic_shapes, strict=False))
    leaves, tree = pytree.tree_flatten_with_path(arguments)
    takes_keys = _takes_keys(module, arguments)
    item: dict[str, Tensor] = {}
    dynamic = {}
    for path, value in leaves:
        keys = [introspection.path_key(key) for key in path]
        named = keys[1:] if takes_keys else keys
        if len(named) > 1 and not takes_keys:
            named = ["KWARGS", *keys]
        name = path_text(str(named[0]), tuple(named[1:]))
        if not isinstance(value, Tensor):
            raise _unsupported(name, value, "a tensor")
        item[name], dynamic[name] = value, _dynamic_dims(dynamic_shapes, keys)
    if not item:
        raise SaveError("example_inputs has no tensors", expected=_KINDS)

    outputs = _run(module, tree, item)
    batched = max_batch_size != 0 and schema.is_batch(
        lambda item: schema.of_values(_run(module, tree, item)), {**item}
    )
    if max_batch_size and not batched:
        raise SaveError(
            f"max_batch_size is {max_batch_size}, and the example's outputs are none of a batch:"
            " with twice the rows they have not twice the rows",
            expected="tensors whose dimension 0 is the batch",
            cure="Set max_batch_size to 0, or correct the example.",
        )
    if not batched:  # Triton has no tensors without dimensions
        item = {name: torch.atleast_1d(value) for name, value in item.items()}
        outputs = {name: torch.atleast_1d(value) for name, value in outputs.items()}
    size = _batch_size(item, max_batch_size) if batched else 0
    specs = [schema.with_any_size(spec, dynamic[spec.name]) for spec in schema.of_values(item)]
    return Example({**item}, schema.entries(specs, batched=batched), size, tree, outputs)


def from_requests(example_inputs: object, max_batch_size: int | None) -> Example:
    """Return the example of a module with hooks, whose inputs are those of a request."""
    if not isinstance(example_inputs, Mapping) or not example_inputs:
        raise SaveError(
            f"example_inputs is {a_type(example_inputs)}, and the model has hooks",
            expected="a dict of the inputs of a request by name",
        )
    item: Item = {}
    for name, value in example_inputs.items():
        if isinstance(value, Tensor):
            item[name] = value.detach().cpu()
        elif isinstance(value, list) and all(isinstance(x, str | bytes) for x in value):
            shape = (-1,) if max_batch_size == 0 else (-1, 1)
            item[name] = np.array(value, dtype=np.object_).reshape(shape)
        else:
            raise _unsupported(name, value, "a tensor, or a list of str or bytes")
    size = _batch_size(item, max_batch_size)
    return Example(item, schema.entries(schema.of_values(item), batched=size > 0), size)


def with_known_inputs(example: Example, pretrained: Document) -> Example:
    """Return the example with the inputs that follow from config.json of a transformers model."""
    entries = artifact_files.pretrained_inputs(pretrained, list(example.item))
    known = [entry["name"] for entry in entries] == list(example.item)
    return replace(example, entries=entries) if known else example


def _batch_size(item: Mapping[str, Value], max_batch_size: int | None) -> int:
    """Return the max_batch_size of the config; None: the default."""
    if max_batch_size is not None:
        return max_batch_size
    rows = next(iter(item.values())).shape[:1]
    return max(schema.DEFAULT_BATCH_SIZE, *rows)


def _unsupported(name: str, value: object, expected: str) -> SaveError:
    return SaveError(
        f"the value of '{name}' in example_inputs is {a_type(value)}",
        expected=expected,
        cure="Leave it out if it has a default.",
    )


def _by_name(module: nn.Module, example: object) -> dict[str, Any]:
    """Return the arguments in an example by name."""
    if isinstance(example, Mapping) and example:
        return {str(name): value for name, value in example.items()}
    if not isinstance(example, Tensor | tuple):
        raise SaveError(
            f"example_inputs is {a_type(example)}",
            expected=f"valid arguments of {introspection.from_function(module.forward)}: {_KINDS}",
        )
    args = example if isinstance(example, tuple) else (example,)
    try:
        return inspect.signature(module.forward).bind(*args).arguments
    except TypeError as error:
        raise _unfit(module, error) from None


def _unfit(module: nn.Module, error: Exception) -> SaveError:
    function = introspection.from_function(module.forward)
    return SaveError(f"example_inputs does not fit {function}: {summarize(error)}", expected=_KINDS)


def _run(
    module: nn.Module,
    tree: TreeSpec,
    item: Mapping[str, Value],
) -> dict[str, Tensor]:
    """Call a module and return its outputs that are tensors by name, on the CPU."""
    # Copied, because forward() may change them in place.
    copies = [torch.as_tensor(value).clone() for value in item.values()]
    try:
        result = module(**pytree.tree_unflatten(copies, tree))
    except Exception as error:  # the module's own code
        raise _unfit(module, error) from error
    names = leaf_names(result)
    values = bind_outputs(names, result)(result)
    return {
        name: value.detach().cpu()
        for name, value in zip(names, values, strict=True)
        if isinstance(value, Tensor)
    }


def _takes_keys(module: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Return whether the keys of the only argument are names of inputs."""
    values = [*arguments.values()]
    if len(values) != 1 or not isinstance(values[0], Mapping):
        return False
    signature = introspection.from_function(module.forward)
    return signature.container_argument([*map(str, values[0])]) is not None


def _dynamic_dims(shapes: Any, keys: Sequence[int | str]) -> set[int]:
    """Return the dimensions of one tensor that `dynamic_shapes` does not fix."""
    for key in keys:
        shapes = shapes.get(key) if isinstance(shapes, Mapping) else shapes and shapes[key]
    sizes = shapes.items() if isinstance(shapes, Mapping) else enumerate(shapes or ())
    fixed = (None, torch.export.Dim.STATIC)
    return {dim for dim, size in sizes if size not in fixed and type(size) is not int}
