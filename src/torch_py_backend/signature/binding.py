"""Bind input names to the leaves of forward()'s call tree; `results` binds output names.

The grammar is the same for all artifacts. The name of an input is, in this order: an argument of
forward(); a path, `ARGS[0]`, `ARGS[2][key]`, `KWARGS[name]`; or `<name>__<number>`, the number of
an argument (of a leaf, if the artifact contains its own call tree). If no name matches, inputs are
bound in the config's order, with a warning.

TorchScript follows the rule of Triton's LibTorch backend: either all names are arguments, or all
are numbers; otherwise all inputs are bound in the config's order. Paths, which that backend does
not support, are also accepted.
"""

from __future__ import annotations

import enum
import itertools
import logging
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch_py_backend.errors import BindingError, join_names

log = logging.getLogger(__name__)

# Keys from an argument (or the result) down to a leaf.
Path: TypeAlias = tuple[int | str, ...]
# A leaf of the call tree: its slot, and the path within. A slot is the name of an argument, or `*n`
# for the n-th positional argument if `*args` contains it.
Place: TypeAlias = tuple[str, Path]
# Builds one argument of forward() from the columns of a batch.
Builder: TypeAlias = Callable[[Sequence[object]], object]
Forward: TypeAlias = Callable[..., object]
# Builds (args, kwargs) of forward() from the tensors of a call tree.
Unflatten: TypeAlias = Callable[[Sequence[object]], tuple[Sequence[object], Mapping[str, object]]]

# As in LibTorch: only digits after the first two underscores.
# Bounded: Python reads no integer of more than 4,300 digits, and follows no path of thousands.
_ORDINAL = re.compile(r"(?:(?!__).)*__([0-9]{1,9})")
_PATH = re.compile(r"(ARGS|KWARGS|RESULT)((?:\[[^\[\]]+\]){0,64})")
_INDEX = re.compile(r"[0-9]{1,9}")


class Passing(enum.Enum):
    """How an argument is passed: the kinds of `inspect.Parameter`."""

    POSITIONAL = "positional"
    KEYWORD = "keyword"
    VAR_POSITIONAL = "*"
    VAR_KEYWORD = "**"


class ArgumentType(enum.Enum):
    """The type of an argument, from its annotation."""

    TENSOR = "a tensor"
    DICT = "a dict of tensors"
    LIST = "a list of tensors"
    TUPLE = "a tuple of tensors"
    INT = "an int"
    FLOAT = "a float"
    BOOL = "a bool"
    STR = "a str"
    RAW = "a bytes"
    VALUE = "one value"
    STRINGS = "a list of str"
    BYTES = "a list of bytes"
    NESTED_STRINGS = "lists of str in lists"
    NESTED_BYTES = "lists of bytes in lists"

    @property
    def scalar(self) -> bool:
        return self in _SCALARS

    @property
    def raw(self) -> bool:
        """Whether strings are passed as bytes, not decoded."""
        return self in (ArgumentType.RAW, ArgumentType.BYTES, ArgumentType.NESTED_BYTES)


_SCALARS = frozenset(
    {
        ArgumentType.INT,
        ArgumentType.FLOAT,
        ArgumentType.BOOL,
        ArgumentType.STR,
        ArgumentType.RAW,
        ArgumentType.VALUE,
    }
)
_CONTAINERS = (ArgumentType.DICT, ArgumentType.LIST, ArgumentType.TUPLE)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of forward().

    Attributes:
        required: it has no default.
        type: its type; a tensor if it has no annotation.
        text: its declaration, for messages.
        nullable: its annotation allows None.
        positional_only: it cannot be passed by keyword.
        keys: the keys of a TypedDict; each is bound to a separate input.
    """

    name: str
    required: bool
    passing: Passing
    type: ArgumentType
    text: str
    nullable: bool = False
    positional_only: bool = False
    keys: tuple[Argument, ...] = ()

    @property
    def named(self) -> bool:
        """Whether it is one argument, not `*` or `**`."""
        return self.passing in (Passing.POSITIONAL, Passing.KEYWORD)


@dataclass(frozen=True, slots=True)
class Signature:
    """The signature of a loaded artifact.

    Attributes:
        leaves: for an artifact that contains its own call tree: the paths of its tensors, in its
            order. None: the call tree follows from the inputs.
        unflatten: a function that builds (args, kwargs) of such a tree from its leaves.
        name: the name of the function, for messages.
        torchscript: it is TorchScript: names follow LibTorch's rule, strings may be any bytes.
        keyword_types: the types of the known names that `**` accepts.
    """

    arguments: tuple[Argument, ...]
    leaves: tuple[str, ...] | None = None
    unflatten: Unflatten | None = None
    name: str = "forward"
    torchscript: bool = False
    keyword_types: Mapping[str, ArgumentType] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the declaration of the function."""
        texts = [argument.text for argument in self.arguments]
        kinds = [argument.passing for argument in self.arguments]
        if Passing.KEYWORD in kinds and Passing.VAR_POSITIONAL not in kinds:
            texts.insert(kinds.index(Passing.KEYWORD), "*")
        return f"{self.name}({', '.join(texts)})"

    def leaf_aliases(self) -> dict[str, int]:
        """Return the names of each leaf: its path, its argument, its last key; not its number."""
        leaves = self.leaves or ()
        aliases = {leaf: index for index, leaf in enumerate(leaves)}
        for index, argument in enumerate(self.arguments):
            if f"ARGS[{index}]" in aliases and argument.passing is Passing.POSITIONAL:
                aliases.setdefault(argument.name, aliases[f"ARGS[{index}]"])
        keys = [leaf.rpartition("[")[2].rstrip("]") for leaf in leaves]
        for index, key in enumerate(keys):
            if not key.isdecimal() and keys.count(key) == 1:
                aliases.setdefault(key, index)
        return aliases

    def leaf_indices(self, names: Sequence[str]) -> list[int | None]:
        """Return the leaf of each name; None for a name that no leaf has."""
        aliases, count = self.leaf_aliases(), len(self.leaves or ())
        indices = [aliases.get(name, ordinal(name)) for name in names]
        return [index if index is not None and index < count else None for index in indices]

    def main_argument(self) -> Argument | None:
        """Return the only argument, or the only one without a default; None: there are several."""
        required = [argument for argument in self.arguments if argument.required] or self.arguments
        return required[0] if len(required) == 1 else None

    def container_argument(self, names: Sequence[str]) -> Argument | None:
        """Return the argument that contains all inputs as its parts, or None."""
        main = self.main_argument()
        if main is None or main.type not in _CONTAINERS:
            return None
        others = {argument.name for argument in self.arguments} - {main.name}
        return None if any(name in others or is_path(name) for name in names) else main

    def slots(self, count: int) -> list[str]:
        """Return the numbered slots for `count` names: positional arguments, items of `*args`."""
        slots = [entry.name for entry in self.arguments if entry.passing is Passing.POSITIONAL]
        if any(argument.passing is Passing.VAR_POSITIONAL for argument in self.arguments):
            slots += [f"*{index}" for index in range(len(slots), count)]
        return slots

    def place(self, name: str, slots: Sequence[str]) -> Place | None:
        """Return the leaf that a name stands for, whatever the other names are; None: no leaf."""
        named = {argument.name for argument in self.arguments if argument.named}
        any_name = any(argument.passing is Passing.VAR_KEYWORD for argument in self.arguments)
        if name in named:
            return name, ()
        path = _PATH.fullmatch(name)
        if path is not None:
            keys = re.findall(r"\[([^\[\]]+)\]", path[2])
            first = keys[0] if keys else ""
            below = tuple(int(key) if _INDEX.fullmatch(key) else key for key in keys[1:])
            if path[1] == "ARGS" and _INDEX.fullmatch(first) and int(first) < len(slots):
                return slots[int(first)], below
            by_keyword = path[1] == "KWARGS" and first and (any_name or first in named)
            return (first, below) if by_keyword else None
        owners = [
            argument.name
            for argument in self.arguments
            if name in [key.name for key in argument.keys]
        ]
        if len(owners) == 1:
            return owners[0], (name,)
        number = ordinal(name)
        if number is not None and number < len(slots):
            return slots[number], ()
        return (name, ()) if any_name else None


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


class BindingRule(enum.Enum):
    """The rule that binds input names to arguments; the values are for reports."""

    ARGUMENTS = "by argument name"
    NUMBERS = "by number"
    KEYS = "as the parts of one argument"
    ORDER = "in the config's order"
    INDIVIDUAL = "each name by itself"


def rule(names: Sequence[str], signature: Signature) -> BindingRule:
    """Return the rule that binds input names, without states and controls of sequences."""
    if signature.leaves is None and signature.container_argument(names) is not None:
        return BindingRule.KEYS
    if {argument.name for argument in signature.arguments if argument.named}.issuperset(names):
        return BindingRule.ARGUMENTS
    if all(ordinal(name) is not None for name in names):
        return BindingRule.NUMBERS
    if signature.leaves is not None or any(map(is_path, names)):
        return BindingRule.INDIVIDUAL
    slots = signature.slots(len(names))
    if signature.torchscript or not any(signature.place(name, slots) for name in names):
        return BindingRule.ORDER
    return BindingRule.INDIVIDUAL


def ordinal(name: str) -> int | None:
    """Return the number in `<name>__<number>`, or None."""
    match = _ORDINAL.fullmatch(name)
    return int(match[1]) if match else None


def path_text(root: str, path: Path) -> str:
    """Return the text of a path: `ARGS[2][key]`."""
    return root + "".join(f"[{key}]" for key in path)


def is_path(name: str) -> bool:
    """Return whether a name is the text of a path."""
    return _PATH.fullmatch(name) is not None


def bind_inputs(
    model: str,
    names: Sequence[str],
    signature: Signature,
    left_out: Collection[str] = (),
    *,
    ordered: bool = True,
    sequence_inputs: Collection[str] = (),
) -> InputBinding:
    """Bind input names to the leaves of forward()'s call tree.

    Args:
        model: the model's name.
        names: input names in the config's order.
        signature: the signature of the artifact.
        left_out: names of optional inputs that are missing in this batch.
        ordered: bind in the config's order if no name matches.
        sequence_inputs: names of states and controls of sequences, which are not inputs of
            requests. Each is bound separately, independent of the rule for the others.

    Raises:
        BindingError: a name matches no leaf, or a leaf has no input or two.
    """
    if len(set(names)) < len(names):
        raise BindingError(model, f"the inputs {join_names(names)} carry the same name twice")
    if signature.leaves is not None:
        return _bind_leaves(model, names, signature, left_out)
    container = signature.container_argument(names)
    if container is not None:
        places = _part_places(model, names, container, signature)
    else:
        places = _places(model, names, signature, ordered=ordered, sequence_inputs=sequence_inputs)
    if len(set(places.values())) < len(places):
        raise BindingError(
            model,
            f"two of the inputs {join_names(names)} feed the same argument",
            expected="one input for each",
        )
    return _bind_places(model, places, signature, left_out)


def accepted_names(
    names: Sequence[str], candidates: Sequence[str], signature: Signature
) -> list[str]:
    """Return the candidates that forward() accepts in addition to the inputs `names`."""
    if signature.leaves is not None:
        indices = signature.leaf_indices(candidates)
        return [name for name, index in zip(candidates, indices, strict=True) if index is not None]
    main = signature.main_argument()
    if main is not None and main.type is ArgumentType.DICT:
        return list(candidates)
    slots = signature.slots(len(names) + len(candidates))
    return [name for name in candidates if signature.place(name, slots) is not None]


def leaf_name(number: int, signature: Signature) -> str:
    """Return the shortest name of a leaf: its argument, its key, else its path."""
    aliases = signature.leaf_aliases()
    return min((name for name, index in aliases.items() if index == number), key=len)


# --- artifacts with their own call tree --------------------------------------------------------


def _bind_leaves(
    model: str, names: Sequence[str], signature: Signature, left_out: Collection[str]
) -> InputBinding:
    leaves, unflatten = signature.leaves or (), signature.unflatten
    indices = signature.leaf_indices(names)
    if len(names) == len(leaves) == 1 and indices == [None]:
        indices = [0]  # unambiguous
    chosen = dict(zip(indices, names, strict=True))
    if len(names) != len(leaves) or chosen.keys() != set(range(len(leaves))) or unflatten is None:
        valid = [*leaves, *(f"INPUT__{index}" for index in range(len(leaves)))]
        raise BindingError(
            model,
            f"the inputs {join_names(names)} do not feed each tensor of {signature} once",
            expected=f"{len(leaves)} inputs with names among {join_names(valid)}",
        )
    if left_out:
        raise BindingError(
            model,
            f"input {join_names(left_out)} is optional, and {signature} has no defaults",
            cure="Remove `optional` from config.pbtxt.",
        )

    def call(module: Forward, columns: Sequence[object]) -> object:
        args, kwargs = unflatten(columns)
        return module(*args, **kwargs)

    in_order = tuple(chosen[index] for index in range(len(leaves)))
    return InputBinding(in_order, (ArgumentType.TENSOR,) * len(leaves), call, leaves)


# --- places in other call trees ----------------------------------------------------------------


def _part_places(
    model: str, names: Sequence[str], container: Argument, signature: Signature
) -> dict[str, Place]:
    """Return the places in an argument that contains all inputs, by keys or by numbers."""
    numbers = [number for number in map(ordinal, names) if number is not None]
    if container.type is not ArgumentType.DICT:
        order = numbers if len(numbers) == len(names) else range(len(names))
        return {name: (container.name, (index,)) for name, index in zip(names, order, strict=True)}
    keys = [key.name for key in container.keys] or list(names)
    aliases = {key: key for key in keys}
    for name in names:
        number = ordinal(name)
        if number is not None and number < len(keys):
            aliases.setdefault(name, keys[number])
    unknown = [name for name in names if name not in aliases]
    if unknown:
        raise BindingError(
            model,
            f"{container.name} of {signature} has no key {join_names(unknown)}",
            expected=f"names among {join_names(keys)}",
        )
    return {name: (container.name, (aliases[name],)) for name in names}


def _places(
    model: str,
    names: Sequence[str],
    signature: Signature,
    *,
    ordered: bool,
    sequence_inputs: Collection[str],
) -> dict[str, Place]:
    """Return the places of names: each separately, else all in the config's order.

    In the config's order, states and controls whose own name has no place come last.
    """
    slots = signature.slots(len(names))
    places = {name: signature.place(name, slots) for name in names}
    requested = [name for name in names if name not in sequence_inputs]
    follows_grammar = any(ordinal(name) is not None or is_path(name) for name in names)
    in_order = not any(places.values()) and not follows_grammar
    if signature.torchscript and ordered:
        binding_rule = rule(requested, signature)
        in_order |= binding_rule is BindingRule.ORDER
        if binding_rule is BindingRule.NUMBERS:  # also for a number that is the name of an argument
            for name in requested:
                number = ordinal(name) or 0
                places[name] = (slots[number], ()) if number < len(slots) else None
    if ordered and in_order:
        log.warning(
            "model '%s': the input names %s are not all arguments of %s, nor all numbers"
            " (INPUT__0, INPUT__1, …); they are passed in the config's order.",
            model,
            ", ".join(requested or names),
            signature,
        )
        for name in requested:
            places[name] = None
        used = {place[0] for place in places.values() if place is not None}
        free = [slot for slot in slots if slot not in used]
        unplaced = sorted((n for n in names if places[n] is None), key=sequence_inputs.__contains__)
        if len(unplaced) > len(free):
            raise BindingError(
                model,
                f"{len(unplaced)} inputs do not fit {signature}",
                expected=f"at most {len(free)} inputs",
            )
        places |= {name: (slot, ()) for name, slot in zip(unplaced, free, strict=False)}
    unknown = [name for name, place in places.items() if place is None]
    if unknown:
        valid = [argument.name for argument in signature.arguments if argument.named]
        valid += [key.name for argument in signature.arguments for key in argument.keys]
        valid += [f"INPUT__{index}" for index in range(len(slots))]
        valid += [f"ARGS[{index}]" for index in range(len(slots))]
        raise BindingError(
            model,
            f"{signature} has no {join_names(unknown)}",
            expected=f"names among {join_names(valid)}",
        )
    return {name: place for name, place in places.items() if place is not None}


# --- from places to a call ---------------------------------------------------------------------


def _bind_places(
    model: str, places: Mapping[str, Place], signature: Signature, left_out: Collection[str]
) -> InputBinding:
    """Pass arguments by position up to the first one without input, then by keyword."""
    feeds: dict[str, dict[Path, str]] = {}
    for name, (slot, path) in places.items():
        if name not in left_out:
            feeds.setdefault(slot, {})[path] = name
    for argument in signature.arguments:
        parts = [name for name, (slot, _) in places.items() if slot == argument.name]
        _check_argument(model, argument, feeds.get(argument.name, {}), parts, left_out, signature)
        if argument.required:
            feeds.setdefault(argument.name, {})  # it allows None
    leading = list(itertools.takewhile(feeds.__contains__, signature.slots(len(places))))
    trailing = [slot for slot in feeds if slot not in leading]
    positional_only = {entry.name for entry in signature.arguments if entry.positional_only}
    if any(slot in positional_only or slot.startswith("*") for slot in trailing):
        raise BindingError(model, f"inputs for * of {signature} leave a gap before them")
    arguments = {argument.name: argument for argument in signature.arguments}
    names: list[str] = []
    builders = {
        slot: _builder(model, feeds[slot], names, arguments.get(slot))
        for slot in (*leading, *trailing)
    }
    declared: dict[Place, ArgumentType] = {
        (name, ()): kind for name, kind in signature.keyword_types.items()
    }
    for argument in signature.arguments:
        declared[argument.name, ()] = argument.type
        declared |= {(argument.name, (key.name,)): key.type for key in argument.keys}
    types = [declared.get(places[name], ArgumentType.TENSOR) for name in names]
    positional = [builders[slot] for slot in leading]
    keywords = {slot: builders[slot] for slot in trailing}

    def call(module: Forward, columns: Sequence[object]) -> object:
        args = [build(columns) for build in positional]
        return module(*args, **{name: build(columns) for name, build in keywords.items()})

    def call_by_position(module: Forward, columns: Sequence[object]) -> object:
        return module(*columns)  # they are in the order of the arguments

    by_position = not keywords and all(isinstance(b, operator.itemgetter) for b in positional)
    return InputBinding(
        tuple(names),
        tuple(ArgumentType.TENSOR if kind in _CONTAINERS else kind for kind in types),
        call_by_position if by_position else call,
        tuple(path_text(*places[name]) for name in names),
    )


def _check_argument(
    model: str,
    argument: Argument,
    feeds: Mapping[Path, str],
    parts: Sequence[str],
    left_out: Collection[str],
    signature: Signature,
) -> None:
    """Raise if the inputs of an argument do not make it up.

    `feeds` are its inputs in this batch, `parts` all of its inputs.
    """
    if not feeds and argument.required and not argument.nullable:
        reason = f"; {join_names(left_out)} cannot be optional" if left_out else ""
        raise BindingError(
            model,
            f"no input feeds {signature.name}()'s argument {argument.name}{reason}",
            expected=f"inputs for {signature}",
            cure="Add them to config.pbtxt, or give the arguments defaults.",
        )
    if feeds and argument.keys:
        fed = {str(path[0]) if path else "" for path in feeds}
        needed = {key.name for key in argument.keys if key.required and not key.nullable}
        if not needed <= fed <= {key.name for key in argument.keys}:
            raise BindingError(
                model,
                f"the inputs {join_names(feeds.values())} do not make the dict"
                f" {argument.name} of {signature}",
                expected=f"inputs for its keys {join_names(key.name for key in argument.keys)}",
            )
    optional = argument.nullable or not argument.required
    if optional and argument.type is ArgumentType.TUPLE and 0 < len(feeds) < len(parts):
        missing = [name for name in parts if name in left_out]
        raise BindingError(
            model,
            f"{argument.name} of {signature} is a tuple, and {join_names(missing)} are left out"
            " of it",
            expected=f"all of {join_names(parts)}, or none of them",
        )


def _builder(
    model: str, feeds: Mapping[Path, str], names: list[str], argument: Argument | None = None
) -> Builder:
    """Return a function that builds a tree from the columns of a batch.

    Args:
        model: the model's name.
        feeds: the inputs by their paths in the tree; none: the tree is None.
        names: the names of all columns so far; those of this tree are appended.
        argument: the argument whose tree it is, if its type is known.
    """
    if not feeds:
        return lambda _: None
    if () in feeds:
        if len(feeds) > 1:
            raise BindingError(
                model, f"{join_names(feeds.values())} feed an argument and a part of it at once"
            )
        names.append(feeds[()])
        return operator.itemgetter(len(names) - 1)
    kind = argument.type if argument is not None else ArgumentType.TENSOR
    branches: dict[int | str, dict[Path, str]] = {}
    for path, name in feeds.items():
        key = str(path[0]) if kind is ArgumentType.DICT else path[0]
        branches.setdefault(key, {})[path[1:]] = name
    if all(isinstance(key, int) for key in branches):
        if branches.keys() != set(range(len(branches))):
            raise BindingError(
                model,
                f"{join_names(feeds.values())} leave gaps in a list",
                expected=f"items 0 to {len(branches) - 1}",
            )
        items = [_builder(model, branches[index], names) for index in range(len(branches))]
        if kind is ArgumentType.TUPLE:
            return lambda columns: tuple([build(columns) for build in items])
        return lambda columns: [build(columns) for build in items]
    keys = argument.keys if argument is not None else ()
    subtrees: dict[str, Mapping[Path, str]] = {
        k.name: {} for k in keys if k.required and k.nullable
    }
    subtrees |= {str(key): branch for key, branch in branches.items()}
    entries = {key: _builder(model, subtree, names) for key, subtree in subtrees.items()}
    return lambda columns: {key: build(columns) for key, build in entries.items()}
