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
from functools import partial
from typing import TypeAlias

from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.errors import BindingError, join_names
from torch_py_backend.signature.arguments import (
    CONTAINERS,
    ArgumentType,
    Passing,
    Path,
    Place,
    Signature,
    Unflatten,
    is_path,
    numbered,
    ordinal,
    path_text,
)

log = logging.getLogger(__name__)

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


def bind_inputs(
    names: Sequence[str],
    signature: Signature,
    left_out: Collection[str] = (),
    *,
    ordered: bool = True,
    sequence_inputs: Collection[str] = (),
) -> InputBinding:
    """Bind input names to the leaves of forward()'s call tree.

    Args:
        names: input names in the config's order.
        signature: the signature of the artifact.
        left_out: names of optional inputs that are missing in this batch.
        ordered: bind in the config's order if no name matches.
        sequence_inputs: names of states and controls of sequences, which are not inputs of
            requests. Each is bound separately, independent of the rule for the others.

    Raises:
        BindingError: a name matches no leaf, or a leaf has no input or two.
    """
    container = signature.container_argument(names)
    if container is None:
        places = _places(names, signature, left_out, sequence_inputs, ordered=ordered)
    else:
        keys: Sequence[str | int] = names
        if container.type is not ArgumentType.DICT:
            numbers = [number for number in map(ordinal, names) if number is not None]
            keys = numbers if len(numbers) == len(names) else range(len(names))
        pairs = zip(names, keys, strict=True)
        places = {name: (container.name, (key,)) for name, key in pairs}
    if len(set(places.values())) < len(names):
        raise BindingError(
            f"two of the inputs {join_names(names)} feed the same argument",
            expected="one input for each",
        )
    sent = {name: place for name, place in places.items() if name not in left_out}
    return _bind_places(sent, signature, left_out)


def with_controls(config: ModelConfig, signature: Signature) -> ModelConfig:
    """Return the config with the controls of sequences added to its inputs that forward() takes."""
    if config.sequencing is None or not config.sequencing.controls:
        return config
    controls = config.sequencing.controls
    slots = signature.slots(len(config.inputs) + len(controls))
    container = signature.container_argument([control.name for control in controls])
    takes_all = container is not None and container.type is ArgumentType.DICT
    specs = [
        TensorSpec(control.name, control.dtype, (1,), origin=Origin.CONTROL)
        for control in controls
        if takes_all or signature.place(control.name, slots) is not None
    ]
    return dataclasses.replace(config, inputs=(*config.inputs, *specs))


def _places(
    names: Sequence[str],
    signature: Signature,
    left_out: Collection[str],
    sequence_inputs: Collection[str],
    *,
    ordered: bool,
) -> dict[str, Place]:
    """Return the places of names: each separately, else all in the config's order."""
    slots = signature.slots(len(names))
    places = {name: signature.place(name, slots) for name in names}
    requested = [name for name in names if name not in sequence_inputs]
    numbers = [ordinal(name) for name in requested]
    by_order = False
    if not signature.torchscript or set(requested) <= set(signature.named):
        in_grammar = any(ordinal(name) is not None or is_path(name) for name in names)
        by_order = not in_grammar and not any(places.values())
    elif None in numbers:
        by_order = not any(map(is_path, requested))
    else:  # also a number that is the name of an argument
        found = (numbered(number, slots) for number in numbers)
        places |= zip(requested, found, strict=True)
    if by_order and ordered:
        places |= dict.fromkeys(requested)
        used = {place[0] for place in places.values() if place is not None}
        # States and controls whose own name has no place follow the inputs of requests.
        unplaced = sorted((n for n in names if places[n] is None), key=sequence_inputs.__contains__)
        free = [slot for slot in slots if slot not in used]
        places |= {name: (slot, ()) for name, slot in zip(unplaced, free, strict=False)}
        if not left_out:  # clients choose what is left out
            log.warning(
                "the input names %s are not all arguments of %s, nor all numbers"
                " (INPUT__0, INPUT__1, …); they are passed in the config's order.",
                ", ".join(requested),
                signature,
            )
    missing = [name for name, place in places.items() if place is None]
    if missing:
        paths = signature.leaves or [f"ARGS[{index}]" for index in range(len(slots))]
        valid = [*signature.named, *(f"INPUT__{index}" for index in range(len(slots))), *paths]
        raise BindingError(
            f"{signature} has no {join_names(missing)}",
            expected=f"names among {join_names(valid)}",
        )
    return {name: place for name, place in places.items() if place is not None}


def _bind_places(
    places: Mapping[str, Place], signature: Signature, left_out: Collection[str]
) -> InputBinding:
    """Pass arguments by position up to the first one without input, then by keyword."""
    feeds: dict[str, dict[Path, str]] = {}
    for name, (slot, path) in places.items():
        feeds.setdefault(slot, {})[path] = name
    for argument in signature.arguments:
        if argument.required and not argument.nullable and argument.name not in feeds:
            reason = f"; {join_names(left_out)} cannot be optional" if left_out else ""
            raise BindingError(
                f"no input feeds {signature.name}()'s argument {argument.name}{reason}",
                expected=f"inputs for {signature}",
                cure="Add them to config.pbtxt, or give the arguments defaults.",
            )
        if argument.required:
            feeds.setdefault(argument.name, {})  # it allows None
    slots = signature.slots(len(places) + len(left_out))
    leading = list(itertools.takewhile(feeds.__contains__, slots))
    trailing = [slot for slot in feeds if slot not in leading]
    by_position = [a.name for a in signature.arguments if a.passing is Passing.POSITIONAL_ONLY]
    if any(slot.startswith("*") or slot in by_position for slot in trailing):
        raise BindingError(f"inputs for * of {signature} leave a gap before them")
    types = {argument.name: argument.type for argument in signature.arguments}
    names: list[str] = []
    args = [_builder(feeds[slot], types.get(slot), names) for slot in leading]
    kwargs = {slot: _builder(feeds[slot], types.get(slot), names) for slot in trailing}

    def call(module: Forward, columns: Sequence[object]) -> object:
        keywords = {name: build(columns) for name, build in kwargs.items()}
        return module(*[build(columns) for build in args], **keywords)

    def call_positional(module: Forward, columns: Sequence[object]) -> object:
        return module(*columns)

    if signature.unflatten is not None:
        call = partial(_call_tree, signature.unflatten)
    # Without containers and keywords, columns are in the order of the arguments.
    elif not trailing and all(() in feeds[slot] for slot in leading):
        call = call_positional
    # Parts of containers are tensors.
    whole = {slot: kind for slot, kind in types.items() if kind not in CONTAINERS}
    whole |= dict.fromkeys(signature.settings, ArgumentType.VALUE)
    columns = [places[name] for name in names]
    tensor = ArgumentType.TENSOR
    return InputBinding(
        tuple(names),
        tuple(tensor if path else whole.get(slot, tensor) for slot, path in columns),
        call,
        tuple(path_text(*place) for place in columns),
    )


def _call_tree(
    unflatten: Unflatten,
    module: Forward,
    columns: Sequence[object],
) -> object:
    args, kwargs = unflatten(columns)
    return module(*args, **kwargs)


def _builder(
    feeds: Mapping[Path, str], kind: ArgumentType | None, names: list[str]
) -> Callable[[Sequence[object]], object]:
    """Return a function that makes an argument, or a part of one, of columns.

    `feeds` are its inputs by their paths in it, whose names are appended to those of the columns.
    """
    if not feeds:
        return lambda _: None
    if () in feeds:
        if len(feeds) > 1:
            raise BindingError(
                f"{join_names(feeds.values())} feed an argument and a part of it at once"
            )
        names.append(feeds[()])
        return operator.itemgetter(len(names) - 1)
    branches: dict[int | str, dict[Path, str]] = {}
    for (key, *below), name in feeds.items():
        branches.setdefault(key, {})[tuple(below)] = name
    if kind is ArgumentType.DICT or not all(isinstance(key, int) for key in branches):
        parts = {str(key): _builder(branch, None, names) for key, branch in branches.items()}
        return lambda columns: {key: build(columns) for key, build in parts.items()}
    if branches.keys() != set(range(len(branches))):
        raise BindingError(
            f"{join_names(feeds.values())} leave gaps in a list",
            expected=f"items 0 to {len(branches) - 1}",
        )
    items = [_builder(branches[index], None, names) for index in range(len(branches))]
    sequence = tuple if kind is ArgumentType.TUPLE else list
    return lambda columns: sequence([build(columns) for build in items])
