"""Bind input names to the leaves of forward()'s call tree; `results` binds output names.

`arguments` has the grammar of names. If no name matches, inputs are bound in the config's order.
TorchScript follows Triton's LibTorch backend: all names are arguments, or all are numbers, else the
order decides. Paths, which that backend does not support, are also accepted.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import BindingError, join_names
from torch_py_backend.signature.arguments import (
    CONTAINERS,
    ArgumentType,
    Path,
    Place,
    Signature,
    is_path,
    ordinal,
    path_text,
)

log = logging.getLogger(__name__)

Forward: TypeAlias = Callable[..., object]
# Makes a part of the arguments of the columns of a batch.
Part: TypeAlias = Callable[[Sequence[Any]], object]


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


def bind_inputs(
    names: Sequence[str],
    signature: Signature,
    left_out: Collection[str] = (),
    *,
    ordered: bool = True,
    sequence_inputs: Collection[str] = (),
) -> InputBinding:
    """Bind input names, in the config's order, to the leaves of forward()'s call tree.

    Optional inputs that are `left_out` are missing in this batch. If no name matches, and they are
    `ordered`, they are bound in their order, but for `sequence_inputs`: states and controls.
    BindingError if a name matches no leaf, or a leaf has no input or two.
    """
    places = _places(names, signature, sequence_inputs, ordered=ordered, quiet=bool(left_out))
    if len(set(places.values())) < len(names):
        raise BindingError(
            f"two of the inputs {join_names(names)} feed the same argument",
            expected="one input for each",
        )
    feeds: dict[str, dict[Path, str]] = {}
    for name, (slot, path) in places.items():
        if name not in left_out:
            feeds.setdefault(slot, {})[path] = name
    _feed_required(signature, feeds, left_out)
    # Arguments are passed by position up to the first one without input, then by keyword.
    leading = list(itertools.takewhile(feeds.__contains__, signature.slots(len(names))))
    types = {argument.name: argument.type for argument in signature.arguments}
    columns: list[str] = []
    args = [_tree(feeds.pop(slot), types.get(slot), columns) for slot in leading]
    kwargs = {slot: _tree(parts, types.get(slot), columns) for slot, parts in feeds.items()}
    if any(slot.startswith("*") for slot in kwargs):
        raise BindingError(f"inputs for * of {signature} leave a gap before them")
    tensor = ArgumentType.TENSOR
    bound = [places[name] for name in columns]

    def call(module: Forward, columns: Sequence[object]) -> object:
        if signature.unflatten is not None:
            values, named = signature.unflatten(columns)
            return module(*values, **named)
        named = {name: part(columns) for name, part in kwargs.items()}
        return module(*[part(columns) for part in args], **named)

    # Parts of containers are tensors.
    whole = {slot: kind for slot, kind in types.items() if kind not in CONTAINERS}
    whole |= dict.fromkeys(signature.settings, ArgumentType.VALUE)
    return InputBinding(
        tuple(columns),
        tuple(tensor if path else whole.get(slot, tensor) for slot, path in bound),
        call,
        tuple(path_text(*place) for place in bound),
    )


def _feed_required(
    signature: Signature,
    feeds: dict[str, dict[Path, str]],
    left_out: Collection[str],
) -> None:
    """Add required arguments that allow None to those with inputs; BindingError for others."""
    for argument in signature.arguments:
        if argument.required and not argument.nullable and argument.name not in feeds:
            reason = f"; {join_names(left_out)} cannot be optional" if left_out else ""
            raise BindingError(
                f"no input feeds {signature.name}()'s argument {argument.name}{reason}",
                expected=f"inputs for {signature}",
                cure="Add them to config.pbtxt, or give the arguments defaults.",
            )
        if argument.required:
            feeds.setdefault(argument.name, {})


def with_controls(config: ModelConfig, signature: Signature) -> ModelConfig:
    """Return the config with the controls of sequences added to its inputs that forward() takes."""
    controls = config.sequencing.controls if config.sequencing is not None else ()
    container = signature.container_argument([control.name for control in controls])
    takes_all = container is not None and container.type is ArgumentType.DICT
    specs = [
        control for control in controls if takes_all or signature.place(control.name) is not None
    ]
    return dataclasses.replace(config, inputs=(*config.inputs, *specs))


def _places(
    names: Sequence[str],
    signature: Signature,
    sequence_inputs: Collection[str],
    *,
    ordered: bool,
    quiet: bool,
) -> dict[str, Place]:
    """Return the places of names: parts of one argument, each separately, or all in order."""
    container = signature.container_argument(names)
    if container is not None:
        keys: Sequence[Any] = names
        if container.type is not ArgumentType.DICT:
            numbers = [ordinal(name) for name in names]
            keys = range(len(names)) if None in numbers else numbers
        return {name: (container.name, (key,)) for name, key in zip(names, keys, strict=True)}
    places = {name: signature.place(name) for name in names}
    requested = [name for name in names if name not in sequence_inputs]
    by_order = not any(places.values())
    if signature.torchscript:
        by_order = (
            not set(requested) <= set(signature.named)
            and None in map(ordinal, requested)
            and not any(map(is_path, requested))
        )
    slots = signature.slots(len(names))
    if by_order and ordered:
        used = [places.get(name) for name in sequence_inputs]
        free = ((slot, ()) for slot in slots if (slot, ()) not in used)
        places |= {name: next(free, None) for name in requested}
        log.log(
            logging.DEBUG if quiet else logging.WARNING,  # once, not for what requests leave out
            "the input names %s are not all arguments of %s, nor all numbers (INPUT__0, INPUT__1,"
            " …); they are passed in the config's order.",
            ", ".join(requested),
            signature,
        )
    known = {name: place for name, place in places.items() if place is not None}
    if len(known) < len(places):
        valid = [*signature.named, *(f"INPUT__{index}" for index in range(len(slots)))]
        raise BindingError(
            f"{signature} has no {join_names(name for name in places if name not in known)}",
            expected=f"names among {join_names(valid)}",
        )
    return known


def _tree(
    feeds: Mapping[Path, str],
    kind: ArgumentType | None,
    columns: list[str],
) -> Part:
    """Return a function that makes an argument, or a part of one, of the columns of a batch.

    `feeds` are its inputs by their paths in it, whose names are appended to those of the columns.
    """
    if not feeds:
        return lambda _: None
    if () in feeds:
        if len(feeds) > 1:
            raise BindingError(
                f"{join_names(feeds.values())} feed an argument and a part of it at once"
            )
        columns.append(feeds[()])
        return operator.itemgetter(len(columns) - 1)
    branches: dict[int | str, dict[Path, str]] = {}
    for (key, *below), name in feeds.items():
        branches.setdefault(key, {})[tuple(below)] = name
    parts = {key: _tree(branch, None, columns) for key, branch in branches.items()}
    if kind is ArgumentType.DICT or not all(isinstance(key, int) for key in parts):
        return lambda columns: {str(key): part(columns) for key, part in parts.items()}
    if parts.keys() != set(range(len(parts))):
        raise BindingError(
            f"{join_names(feeds.values())} leave gaps in a list",
            expected=f"items 0 to {len(parts) - 1}",
        )
    items = [parts[index] for index in range(len(parts))]
    if kind is ArgumentType.TUPLE:
        return lambda columns: tuple([part(columns) for part in items])
    return lambda columns: [part(columns) for part in items]
