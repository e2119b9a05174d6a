"""Example inputs of a module in memory: their names, their entries in config.pbtxt, the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend.autocomplete import schema
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.errors import SaveError, a_type, join_names, summarize
from torch_py_backend.loading.example_inputs import distinct_rows
from torch_py_backend.model_folders import artifact_files
from torch_py_backend.pipeline import differences
from torch_py_backend.signature import introspection
from torch_py_backend.signature.arguments import Passing, Signature, path_text
from torch_py_backend.signature.results import bind_outputs, leaf_names
from torch_py_backend.values import Item, Value

_KINDS = "a tensor, a tuple of positional arguments, or a dict of arguments by name"


class Arguments(NamedTuple):
    """The arguments of one call of forward()."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, function: Callable[[Tensor], Tensor]) -> Arguments:
        """Return the arguments with a function applied to each tensor."""
        args, kwargs = pytree.tree_map_only(Tensor, function, tuple(self))
        return Arguments(args, kwargs)


@dataclass(frozen=True, slots=True)
class Example:
    """Valid inputs of a module.

    Attributes:
        item: the inputs of a request by name; strings are arrays of objects.
        entries: the inputs in config.pbtxt.
        max_batch_size: that of config.pbtxt.
        arguments: those of forward(); None: hooks make them from the item.
        outputs: those of the module, on the CPU; empty with hooks.
    """

    item: Item
    entries: list[JsonObject]
    max_batch_size: int
    arguments: Arguments | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)


def from_arguments(
    module: nn.Module,
    example_inputs: object,
    max_batch_size: int | None,
    dynamic_shapes: Any,
    *,
    by_name: bool,
) -> Example:
    """Return the example of a module without hooks, from the arguments of `save_model`.

    With `by_name`, all arguments are passed by name where forward() allows it.
    """
    signature = introspection.from_function(module.forward)
    call = _call(signature, example_inputs, by_name=by_name)
    outputs = _run(module, call)
    item: dict[str, Tensor] = {}
    dynamic = {}
    for name, value, shape in _leaves(signature, call, dynamic_shapes):
        if not isinstance(value, Tensor):
            raise _unsupported(name, value, "a tensor")
        item[name], dynamic[name] = value, _dynamic_dims(shape)
    if not item:
        raise SaveError("example_inputs has no tensors", expected=_KINDS)
    batched = max_batch_size != 0 and _is_batch(module, call, item, outputs)
    if max_batch_size and not batched:
        raise SaveError(
            f"max_batch_size is {max_batch_size}, and the example's outputs are none of a batch:"
            " with twice the rows they have not twice the rows, or a row alone has other values",
            expected="tensors whose dimension 0 is the batch, with rows that do not depend on each"
            " other: Triton batches those of all clients",
            cure="Set max_batch_size to 0, or correct the example.",
        )
    if not batched:  # Triton has no tensors without dimensions
        call = call.map(_with_dims)
        item = {name: _with_dims(value) for name, value in item.items()}
        outputs = {name: _with_dims(value) for name, value in outputs.items()}
    size = _batch_size(item, max_batch_size) if batched else 0
    return Example({**item}, _entries(item, dynamic, size), size, call, outputs)


def _with_dims(value: Tensor) -> Tensor:
    return value.reshape(value.shape or (1,))


def from_requests(example_inputs: object, max_batch_size: int | None) -> Example:
    """Return the example of a module with hooks, whose inputs are those of a request."""
    if not isinstance(example_inputs, Mapping) or not example_inputs:
        raise SaveError(
            f"example_inputs is {describe_type(example_inputs)}, and the model has hooks",
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
    return Example(item, _entries(item, {}, size), size)


def with_known_inputs(example: Example, pretrained: Document) -> Example:
    """Return the example with the types and sizes in config.json of a transformers model."""
    entries = artifact_files.pretrained_inputs(pretrained, list(example.item))
    known = [entry["name"] for entry in entries] == list(example.item)
    return replace(example, entries=entries) if known else example


def _batch_size(item: Mapping[str, Value], max_batch_size: int | None) -> int:
    """Return the max_batch_size of the config; None: the default."""
    if max_batch_size is not None:
        return max_batch_size
    rows = next(iter(item.values())).shape[:1]
    return max(schema.DEFAULT_BATCH_SIZE, *rows, 0)


def _entries(
    item: Mapping[str, Value], dynamic: Mapping[str, set[int]], max_batch_size: int
) -> list[JsonObject]:
    """Return the inputs in config.pbtxt; the dims in `dynamic` are -1."""
    whole = []
    for spec in schema.of_values(item):
        varying = dynamic.get(spec.name, ())
        dims = tuple(-1 if dim in varying else size for dim, size in enumerate(spec.dims))
        whole.append(replace(spec, dims=dims))
    return schema.entries(whole, batched=max_batch_size > 0)


def describe_type(value: object) -> str:
    """Return the type of a value as a noun phrase."""
    return "missing" if value is None else a_type(value)


def _unsupported(name: str, value: object, expected: str) -> SaveError:
    return SaveError(
        f"the value of '{name}' in example_inputs is {a_type(value)}",
        expected=expected,
        cure="Leave it out if it has a default.",
    )


# --- calls -----------------------------------------------------------------------------------


def _declaration(signature: Signature) -> str:
    return f"forward({join_names(signature.named)})"


def _call(signature: Signature, example: object, *, by_name: bool) -> Arguments:
    """Return the arguments in an example."""
    if isinstance(example, Mapping) and example:
        return Arguments((), {str(name): value for name, value in example.items()})
    if not isinstance(example, Tensor | tuple):
        raise SaveError(
            f"example_inputs is {describe_type(example)}",
            expected=f"valid arguments of {_declaration(signature)}: {_KINDS}",
        )
    args = example if isinstance(example, tuple) else (example,)
    arguments = signature.arguments[: len(args)]
    passed = {entry.passing for entry in arguments}
    if by_name and len(arguments) == len(args) and passed <= {Passing.POSITIONAL_OR_KEYWORD}:
        names = (entry.name for entry in arguments)
        return Arguments((), dict(zip(names, args, strict=True)))
    return Arguments(args, {})


def _run(module: nn.Module, call: Arguments) -> dict[str, Tensor]:
    """Call a module and return its outputs that are tensors by name, on the CPU."""
    args, kwargs = call.map(torch.clone)  # forward() may change them in place
    try:
        result = module(*args, **kwargs)
    except Exception as error:  # the module's own code
        declaration = _declaration(introspection.from_function(module.forward))
        raise SaveError(
            f"example_inputs does not fit {declaration}: {summarize(error)}",
            expected=_KINDS,
        ) from error
    names = leaf_names(result)
    values = bind_outputs(names, result)(result)
    outputs = {
        name: value.detach().cpu()
        for name, value in zip(names, values, strict=True)
        if isinstance(value, Tensor)
    }
    if not outputs:
        types = join_names(map(a_type, values)) or "nothing"
        raise SaveError(f"forward() returns {types}, without tensors", expected="tensors")
    return outputs


def _is_batch(
    module: nn.Module, call: Arguments, item: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> bool:
    """Return whether dimension 0 is that of a batch, whose rows do not depend on each other.

    With twice the rows, dimension 0 of every output doubles, and no other. The outputs of the first
    and the last row alone are those in the batch.
    """
    sizes = {tuple(value.shape[:1]) for value in item.values()}
    if len(sizes) != 1 or sizes in ({()}, {(0,)}):
        return False
    try:
        # An example may have one row, or repeat it.
        batch = call.map(lambda value: distinct_rows(torch.cat([value, value])))
        together, first, last = (
            _run(module, batch.map(itemgetter(rows)))
            for rows in (slice(None), slice(0, 1), slice(-1, None))
        )
    except (SaveError, RuntimeError):  # forward() takes no other number of rows
        return False
    ((rows,),) = sizes
    twice = {name: (2 * rows, *value.shape[1:]) for name, value in outputs.items()}
    return (
        twice == {name: tuple(value.shape) for name, value in together.items()}
        and differences.dependent_output(together, first, last) is None
    )


# --- names and sizes of leaves ---------------------------------------------------------------


def _leaves(
    signature: Signature, call: Arguments, shapes: Any
) -> Iterator[tuple[str, object, Any]]:
    """Yield the input's name, the value and the part of `dynamic_shapes` of each leaf of a call."""
    slots = signature.slots(len(call.args))
    values = {**dict(zip(slots, call.args, strict=False)), **call.kwargs}
    if isinstance(shapes, Sequence):
        shapes = dict(zip(values, shapes, strict=False))
    for number, (place, value) in enumerate(values.items()):
        shape = _part(shapes, place)
        if not isinstance(value, Mapping | list | tuple) and not place.startswith("*"):
            yield place, value, shape
        elif (
            len(values) == 1
            and isinstance(value, Mapping)
            and signature.container_argument([*value])
        ):
            for key, part in value.items():
                yield from _parts(str(key), part, _part(shape, key))
        else:
            positional = number < len(call.args)
            path = f"ARGS[{number}]" if positional else f"KWARGS[{place}]"
            yield from _parts(path, value, shape)


def _parts(name: str, value: object, shape: Any) -> Iterator[tuple[str, object, Any]]:
    """Yield what `_leaves` does for the leaves of a value with this name."""
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            yield from _parts(path_text(name, (key,)), part, _part(shape, key))
    else:
        yield name, value, shape


def _part(shapes: Any, key: Any) -> Any:
    """Return the part of `dynamic_shapes` for one argument, or one part of an argument."""
    if isinstance(shapes, Mapping):
        return shapes.get(key)
    return shapes[key] if isinstance(shapes, Sequence) and key < len(shapes) else None


def _dynamic_dims(shape: Any) -> set[int]:
    """Return the dimensions that `dynamic_shapes` does not fix, of one tensor."""
    sizes = shape.items() if isinstance(shape, Mapping) else enumerate(shape or ())
    fixed = (None, torch.export.Dim.STATIC)
    return {dim for dim, size in sizes if size not in fixed and type(size) is not int}
