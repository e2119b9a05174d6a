"""From places in a call tree to a function that calls a module with the columns of a batch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch_py_backend.errors import BindingError, join_names
from torch_py_backend.signature.arguments import (
    Argument,
    ArgumentType,
    Passing,
    Path,
    Place,
    Signature,
    path_text,
)

Forward: TypeAlias = Callable[..., object]


@dataclass(frozen=True, slots=True)
class InputBinding:
    """The binding of the columns of a batch to arguments.

    Attributes:
        names: tensor names, in the order in which `call` expects their columns.
        types: the type that each column is converted to.
        call: a function that calls a module with the columns.
        places: the argument or path that each column is bound to, for reports.
    """

    names: tuple[str, ...]
    types: tuple[ArgumentType, ...]
    call: Callable[[Forward, Sequence[object]], object]
    places: tuple[str, ...] = ()


def bind_places(
    places: Mapping[str, Place], signature: Signature, left_out: Collection[str]
) -> InputBinding:
    """Pass arguments by position up to the first one without input, then by keyword.

    Raises:
        BindingError: an argument has no input, or its inputs do not make it up.
    """
    feeds: dict[str, dict[Path, str]] = {}
    for name, (slot, path) in places.items():
        if name not in left_out:
            feeds.setdefault(slot, {})[path] = name
    for argument in signature.arguments:
        parts = [name for name, (slot, _) in places.items() if slot == argument.name]
        _check_argument(argument, feeds.get(argument.name, {}), parts, left_out, signature)
        if argument.required:
            feeds.setdefault(argument.name, {})  # it allows None
    leading = list(itertools.takewhile(feeds.__contains__, signature.slots(len(places))))
    trailing = [slot for slot in feeds if slot not in leading]
    positional_only = {
        entry.name for entry in signature.arguments if entry.passing is Passing.POSITIONAL_ONLY
    }
    if any(slot in positional_only or slot.startswith("*") for slot in trailing):
        raise BindingError(f"inputs for * of {signature} leave a gap before them")
    arguments = {argument.name: argument for argument in signature.arguments}
    args = [_tree(feeds[slot], arguments.get(slot)) for slot in leading]
    kwargs = {slot: _tree(feeds[slot], arguments.get(slot)) for slot in trailing}
    names: list[str] = []
    build_args, build_kwargs = _builder(args, names), _builder(kwargs, names)

    def call(module: Forward, columns: Sequence[object]) -> object:
        return module(*build_args(columns), **build_kwargs(columns))

    def call_positional(module: Forward, columns: Sequence[object]) -> object:
        return module(*columns)

    return InputBinding(
        tuple(names),
        tuple(_column_type(signature, places[name]) for name in names),
        # Without containers and keywords, columns are in the order of the arguments.
        call_positional if args == names else call,
        tuple(path_text(*places[name]) for name in names),
    )


def _builder(tree: Any, names: list[str]) -> Callable[[Sequence[object]], Any]:
    """Return a function that makes the tree of columns; append the tree's names to the others."""
    if tree is None:
        return lambda _: None
    if isinstance(tree, str):
        names.append(tree)
        return operator.itemgetter(len(names) - 1)
    if isinstance(tree, dict):
        entries = {key: _builder(part, names) for key, part in tree.items()}
        return lambda columns: {key: build(columns) for key, build in entries.items()}
    sequence, items = type(tree), [_builder(part, names) for part in tree]
    return lambda columns: sequence([build(columns) for build in items])


def _column_type(signature: Signature, place: Place) -> ArgumentType:
    """Return the type of an argument or key; parts of containers are tensors."""
    types: dict[Place, ArgumentType] = {
        (name, ()): kind for name, kind in signature.keyword_types.items()
    }
    for argument in signature.arguments:
        types[argument.name, ()] = argument.type
        types |= {(argument.name, (key.name,)): key.type for key in argument.keys}
    kind = types.get(place, ArgumentType.TENSOR)
    return ArgumentType.TENSOR if kind.container else kind


def _check_argument(
    argument: Argument,
    feeds: Mapping[Path, str],
    parts: Sequence[str],
    left_out: Collection[str],
    signature: Signature,
) -> None:
    """Raise if the inputs of an argument do not make it up.

    `feeds` are its inputs in this batch, `parts` all of its inputs.
    """
    if not feeds:
        if argument.required and not argument.nullable:
            reason = f"; {join_names(left_out)} cannot be optional" if left_out else ""
            raise BindingError(
                f"no input feeds {signature.name}()'s argument {argument.name}{reason}",
                expected=f"inputs for {signature}",
                cure="Add them to config.pbtxt, or give the arguments defaults.",
            )
        return
    keys = {key.name for key in argument.keys}
    needed = {key.name for key in argument.keys if key.required and not key.nullable}
    if keys and not needed <= {str(path[0]) if path else "" for path in feeds} <= keys:
        raise BindingError(
            f"the inputs {join_names(feeds.values())} do not make the dict"
            f" {argument.name} of {signature}",
            expected=f"inputs for its keys {join_names(key.name for key in argument.keys)}",
        )
    optional = argument.nullable or not argument.required
    if optional and argument.type is ArgumentType.TUPLE and len(feeds) < len(parts):
        missing = [name for name in parts if name in left_out]
        raise BindingError(
            f"{argument.name} of {signature} is a tuple, and {join_names(missing)} are left out"
            " of it",
            expected=f"all of {join_names(parts)}, or none of them",
        )


def _tree(feeds: Mapping[Path, str], argument: Argument | None = None) -> Any:
    """Return a tree of the names of inputs, by their paths in it; None without inputs.

    `argument` is the one whose tree it is, if its type is known.
    """
    if not feeds:
        return None
    if () in feeds:
        if len(feeds) > 1:
            raise BindingError(
                f"{join_names(feeds.values())} feed an argument and a part of it at once"
            )
        return feeds[()]
    kind = argument.type if argument is not None else ArgumentType.TENSOR
    branches: dict[int | str, dict[Path, str]] = {}
    for (key, *below), name in feeds.items():
        branch = branches.setdefault(str(key) if kind is ArgumentType.DICT else key, {})
        branch[tuple(below)] = name
    if all(isinstance(key, int) for key in branches):
        if branches.keys() != set(range(len(branches))):
            raise BindingError(
                f"{join_names(feeds.values())} leave gaps in a list",
                expected=f"items 0 to {len(branches) - 1}",
            )
        items = [_tree(branches[index]) for index in range(len(branches))]
        return tuple(items) if kind is ArgumentType.TUPLE else items
    keys = argument.keys if argument is not None else ()
    missing = {key.name: None for key in keys if key.required and key.nullable}
    return missing | {str(key): _tree(branch) for key, branch in branches.items()}
