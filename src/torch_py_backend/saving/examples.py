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

from torch_py_backend.autocomplete import specs
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import SaveError, a_type, join_names, summarize
from torch_py_backend.loading.example_inputs import distinct_rows
from torch_py_backend.pipeline import differences
from torch_py_backend.signature import introspection
from torch_py_backend.signature.arguments import Passing, Signature, path_text
from torch_py_backend.signature.results import bind_outputs, leaf_names
from torch_py_backend.values import Item

_BATCH_SIZE = 8
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
        output_entries: the outputs in config.pbtxt; empty: the model has to be run to know them.
    """

    item: Item
    entries: list[JsonObject]
    max_batch_size: int
    arguments: Arguments | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)
    output_entries: list[JsonObject] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """The first dimension of the first input; 0: it has none."""
        return _rows(self.item)


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

    Raises:
        SaveError: an example is missing or does not fit forward(), or has no batch dimension.
        ArtifactError: Triton lacks the type of a tensor.
    """
    signature = introspection.from_function(module.forward)
    call = _call(signature, example_inputs)
    if by_name:
        call = _by_keyword(signature, call)
    results = _run(module, call)
    outputs = _tensors(results)
    item: Item = {}
    dynamic = {}
    for name, tensor, shape in _leaves(signature, call, dynamic_shapes):
        if not isinstance(tensor, Tensor):
            raise _unsupported(name, tensor, "a tensor")
        item[name], dynamic[name] = tensor, _dynamic_dims(shape)
    batched = max_batch_size != 0 and _is_batch(module, call, item, outputs)
    if max_batch_size and not batched:
        raise SaveError(
            f"max_batch_size is {max_batch_size}, and the example's outputs are none of a batch:"
            " with twice the rows they have not twice the rows, or a row alone has other values",
            expected="tensors whose dimension 0 is the batch, with rows that do not depend on each"
            " other: Triton batches those of all clients",
            cure="Set max_batch_size to 0, or correct the example.",
        )
    if max_batch_size is None:
        max_batch_size = max(_BATCH_SIZE, _rows(item)) if batched else 0
    entries = _entries(item, dynamic, max_batch_size)
    if not max_batch_size:  # Triton has no tensors without dimensions
        outputs = {output: value.reshape(value.shape or 1) for output, value in outputs.items()}
    known = not any(dynamic.values()) and len(outputs) == len(results)
    output_entries = _entries({**outputs}, {}, max_batch_size) if known else []
    return Example(item, entries, max_batch_size, call, outputs, output_entries)


def from_requests(example_inputs: object, max_batch_size: int | None) -> Example:
    """Return the example of a module with hooks, whose inputs are those of a request.

    Raises:
        SaveError: an example is missing, or has other values than tensors and strings.
    """
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
    if len({isinstance(value, Tensor) for value in item.values()}) > 1:
        raise SaveError(
            "example_inputs has tensors and strings",
            expected="one of them",
            cure="Let the hooks take strings only, or write the folder by hand.",
        )
    if max_batch_size is None:
        max_batch_size = max(_BATCH_SIZE, _rows(item))
    return Example(item, _entries(item, {}, max_batch_size), max_batch_size)


def _run(module: nn.Module, call: Arguments) -> dict[str, object]:
    """Call a module and return its outputs by name.

    Raises:
        SaveError: the call fails.
    """
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
    return dict(zip(names, bind_outputs(names, result)(result), strict=True))


def _tensors(results: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the outputs that are tensors, on the CPU.

    Raises:
        SaveError: there are none.
    """
    outputs = {
        name: value.detach().cpu() for name, value in results.items() if isinstance(value, Tensor)
    }
    if not outputs:
        types = join_names(map(a_type, results.values())) or "nothing"
        raise SaveError(f"forward() returns {types}, without tensors", expected="tensors")
    return outputs


def _declaration(signature: Signature) -> str:
    return f"forward({join_names(signature.named)})"


def describe_type(value: object) -> str:
    """Return the type of a value as a noun phrase."""
    return "missing" if value is None else a_type(value)


def _unsupported(name: str, value: object, expected: str) -> SaveError:
    return SaveError(
        f"the value of '{name}' in example_inputs is {a_type(value)}",
        expected=expected,
        cure="Leave it out if it has a default.",
    )


# --- the arguments of forward() --------------------------------------------------------------


def _call(signature: Signature, example: object) -> Arguments:
    """Return the arguments in an example."""
    if isinstance(example, Tensor):
        return Arguments((example,), {})
    if isinstance(example, tuple):
        return Arguments(example, {})
    if isinstance(example, Mapping) and example:
        return Arguments((), {str(name): value for name, value in example.items()})
    raise SaveError(
        f"example_inputs is {describe_type(example)}",
        expected=f"valid arguments of {_declaration(signature)}: {_KINDS}",
    )


def _by_keyword(signature: Signature, call: Arguments) -> Arguments:
    """Return a call with all arguments by name; unchanged if forward() does not allow that."""
    arguments = signature.arguments[: len(call.args)]
    if len(arguments) < len(call.args) or any(
        entry.passing is not Passing.POSITIONAL_OR_KEYWORD for entry in arguments
    ):
        return call
    by_name = {entry.name: value for entry, value in zip(arguments, call.args, strict=True)}
    return Arguments((), by_name | call.kwargs)


def _leaves(
    signature: Signature, call: Arguments, dynamic_shapes: Any
) -> Iterator[tuple[str, object, Any]]:
    """Yield the input's name, the value and the part of `dynamic_shapes` of each leaf of a call."""
    slots = signature.slots(len(call.args))[: len(call.args)]
    places = [*slots, *call.kwargs]
    if isinstance(dynamic_shapes, Sequence):
        dynamic_shapes = dict(zip(places, dynamic_shapes, strict=False))
    (main, *others) = (*call.args, *call.kwargs.values())
    unpacked = not others and isinstance(main, Mapping) and signature.container_argument([*main])
    leaves: list[tuple[Any, object]] = pytree.tree_flatten_with_path(tuple(call))[0]
    for (root, first, *keys), value in leaves:
        place = first.key if root.idx else slots[first.idx]
        path = tuple(key.key if isinstance(key, pytree.MappingKey) else key.idx for key in keys)
        shape = _part(dynamic_shapes, place)
        for key in path:
            shape = _part(shape, key)
        if unpacked and path:
            name = path_text(str(path[0]), path[1:])
        elif path or place.startswith("*"):
            name = path_text(f"KWARGS[{place}]" if root.idx else f"ARGS[{first.idx}]", path)
        else:
            name = place
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


# --- the batch dimension, and sizes ----------------------------------------------------------


def _rows(item: Item) -> int:
    return next(iter(next(iter(item.values())).shape), 0)


def _is_batch(
    module: nn.Module, call: Arguments, item: Item, outputs: Mapping[str, Tensor]
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
            _tensors(_run(module, batch.map(itemgetter(rows))))
            for rows in (slice(None), slice(0, 1), slice(-1, None))
        )
    except (SaveError, RuntimeError):  # forward() takes no other number of rows
        return False
    rows = 2 * _rows(item)
    twice = {name: (rows, *value.shape[1:]) for name, value in outputs.items()}
    return (
        twice == {name: tuple(value.shape) for name, value in together.items()}
        and differences.dependent_output(together, first, last) is None
    )


def _entries(item: Item, dynamic: Mapping[str, set[int]], max_batch_size: int) -> list[JsonObject]:
    """Return the inputs in config.pbtxt."""
    if not item:
        raise SaveError("example_inputs has no tensors", expected=_KINDS)
    if not max_batch_size and any(value.ndim == 0 for value in item.values()):
        raise SaveError(
            "a value in example_inputs has no dimensions, and there is no batch dimension",
            expected="at least one dimension, as Triton requires",
        )
    whole = []
    for spec in specs.of_values(item):
        varying = dynamic.get(spec.name, ())
        dims = tuple(-1 if dim in varying else size for dim, size in enumerate(spec.dims))
        whole.append(replace(spec, dims=dims))
    return [specs.entry_of(spec) for spec in specs.row_specs(whole, batched=max_batch_size > 0)]
