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
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch_py_backend.errors import BindingError, join_names

log = logging.getLogger(__name__)

# Keys from an argument (or the result) down to a leaf.
Path: TypeAlias = tuple[int | str, ...]
# The tree of one argument, with column numbers as leaves.
Template: TypeAlias = "int | list[Template] | tuple[Template, ...] | dict[str, Template]"

# As in LibTorch: only digits after the first two underscores.
_ORDINAL = re.compile(r"(?:(?!__).)*__([0-9]+)")
_PATH = re.compile(r"(ARGS|KWARGS|RESULT)((?:\[[^\[\]]+\])*)")


class Passing(enum.Enum):
    """How an argument is passed: the kinds of `inspect.Parameter`."""

    POSITIONAL = "positional"
    KEYWORD = "keyword"
    REST = "*"
    REST_BY_NAME = "**"


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
        return self in (
            ArgumentType.INT,
            ArgumentType.FLOAT,
            ArgumentType.BOOL,
            ArgumentType.STR,
            ArgumentType.RAW,
            ArgumentType.VALUE,
        )

    @property
    def raw(self) -> bool:
        """Whether strings are passed as bytes, not decoded."""
        return self in (ArgumentType.RAW, ArgumentType.BYTES, ArgumentType.NESTED_BYTES)


_CONTAINERS = (ArgumentType.DICT, ArgumentType.LIST, ArgumentType.TUPLE)
_NAMED = (Passing.POSITIONAL, Passing.KEYWORD)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of forward().

    Attributes:
        name: its name.
        required: it has no default.
        passing: how it is passed.
        takes: its type; a tensor if it has no annotation.
        text: its declaration, for messages.
        nullable: its annotation allows None.
        unnamed: it is positional-only.
        keys: the keys of a TypedDict; each is bound to an input of its own.
    """

    name: str
    required: bool
    passing: Passing
    takes: ArgumentType
    text: str
    nullable: bool = False
    unnamed: bool = False
    keys: tuple[Argument, ...] = ()


@dataclass(frozen=True, slots=True)
class Signature:
    """The signature of a loaded artifact.

    Attributes:
        arguments: the arguments of forward().
        leaves: for an artifact that contains its own call tree: the paths of its tensors, in its
            order. None: the call tree follows from the inputs.
        unflatten: a function that builds (args, kwargs) of such a tree from its leaves.
        name: the name of the function, for messages.
        torchscript: it is TorchScript: names follow LibTorch's rule, strings may be any bytes.
        by_name: the types of the known names that `**` accepts.
    """

    arguments: tuple[Argument, ...]
    leaves: tuple[str, ...] | None = None
    unflatten: Callable[[Sequence[Any]], tuple[Sequence[Any], Mapping[str, Any]]] | None = None
    name: str = "forward"
    torchscript: bool = False
    by_name: Mapping[str, ArgumentType] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the declaration of the function."""
        texts = [argument.text for argument in self.arguments]
        kinds = [argument.passing for argument in self.arguments]
        if Passing.KEYWORD in kinds and Passing.REST not in kinds:
            texts.insert(kinds.index(Passing.KEYWORD), "*")
        return f"{self.name}({', '.join(texts)})"


@dataclass(frozen=True, slots=True)
class InputBinding:
    """The binding of the columns of a batch to arguments.

    Attributes:
        names: tensor names, in the order in which `call` expects their columns.
        takes: the type that each column is converted to.
        call: a function that calls a module with the columns.
        places: the argument or path that each column is bound to, for reports.
    """

    names: tuple[str, ...]
    takes: tuple[ArgumentType, ...]
    call: Callable[[Callable[..., Any], Sequence[Any]], Any]
    places: tuple[str, ...] = ()


class BindingRule(enum.Enum):
    """The rule that binds input names to arguments; the values are for reports."""

    ARGUMENTS = "by argument name"
    NUMBERS = "by number"
    KEYS = "as the parts of one argument"
    ORDER = "in the config's order"
    OWN = "each name by itself"


def rule(names: Sequence[str], signature: Signature) -> BindingRule:
    """Return the rule that binds input names to arguments.

    Args:
        names: the names of the inputs of requests, without states and controls of sequences.
        signature: the signature of the artifact.
    """
    named = {argument.name for argument in signature.arguments if argument.passing in _NAMED}
    if signature.leaves is None and _container_argument(names, signature) is not None:
        return BindingRule.KEYS
    if named.issuperset(names):
        return BindingRule.ARGUMENTS
    if all(ordinal(name) is not None for name in names):
        return BindingRule.NUMBERS
    slots = _slots(names, signature)
    fits = any(_place(name, slots, signature) is not None for name in names)
    if signature.leaves is not None or any(map(_parse_path, names)):
        return BindingRule.OWN
    return BindingRule.OWN if fits and not signature.torchscript else BindingRule.ORDER


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


def _parse_path(name: str) -> tuple[str, Path] | None:
    match = _PATH.fullmatch(name)
    if match is None:
        return None
    keys = re.findall(r"\[([^\[\]]+)\]", match[2])
    return match[1], tuple(int(key) if key.isdecimal() else key for key in keys)


# --- inputs ----------------------------------------------------------------------------------


def bind_inputs(
    model: str,
    names: Sequence[str],
    signature: Signature,
    left_out: Collection[str] = (),
    *,
    ordered: bool = True,
    kept: Collection[str] = (),
) -> InputBinding:
    """Bind input names to the leaves of forward()'s call tree.

    Args:
        model: the model's name.
        names: input names in the config's order.
        signature: the signature of the artifact.
        left_out: names of optional inputs that are missing in this batch.
        ordered: bind in the config's order if no name matches.
        kept: names of states and controls of sequences, which are not inputs of requests. Each is
            bound separately, independent of the rule for the others.

    Raises:
        BindingError: a name matches no leaf, or a leaf has no input or two.
    """
    if len(set(names)) < len(names):
        raise BindingError(model, f"the inputs {join_names(names)} carry the same name twice")
    if signature.leaves is not None:
        return _bind_leaves(model, names, signature, left_out)
    places = _places(model, names, signature, ordered=ordered, kept=kept)
    return _assemble(model, places, signature, left_out)


def accepted_names(names: Sequence[str], more: Sequence[str], signature: Signature) -> list[str]:
    """Return the names in `more` that forward() accepts in addition to the inputs `names`."""
    if signature.leaves is not None:
        aliases = _leaf_aliases(signature.leaves, signature)
        count = len(signature.leaves)
        return [name for name in more if _leaf_index(name, aliases, count) is not None]
    single = _single_argument(signature)
    if single is not None and single.takes is ArgumentType.DICT:
        return list(more)
    slots = _slots([*names, *more], signature)
    return [name for name in more if _place(name, slots, signature) is not None]


def _bind_leaves(
    model: str, names: Sequence[str], signature: Signature, left_out: Collection[str]
) -> InputBinding:
    """Bind names to the leaves of the artifact's own tree; each leaf needs an input."""
    leaves = signature.leaves or ()
    unflatten = signature.unflatten
    aliases = _leaf_aliases(leaves, signature)
    positions = [_leaf_index(name, aliases, len(leaves)) for name in names]
    known = [index for index in positions if index is not None]
    if not known and len(names) == len(leaves) == 1:
        known = [0]  # unambiguous
    chosen = dict(zip(known, names, strict=False))
    if len(chosen) < len(names) or chosen.keys() != set(range(len(leaves))) or unflatten is None:
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

    def call(module: Callable[..., Any], columns: Sequence[Any]) -> Any:
        args, kwargs = unflatten(columns)
        return module(*args, **kwargs)

    ordered = tuple(chosen[index] for index in range(len(leaves)))
    return InputBinding(ordered, (ArgumentType.TENSOR,) * len(ordered), call, tuple(leaves))


def _leaf_aliases(leaves: Sequence[str], signature: Signature) -> dict[str, int]:
    """Return the names of each leaf, except its number: its path, its argument, its last key."""
    aliases = {leaf: index for index, leaf in enumerate(leaves)}
    for index, argument in enumerate(signature.arguments):
        if f"ARGS[{index}]" in aliases and argument.passing is Passing.POSITIONAL:
            aliases.setdefault(argument.name, aliases[f"ARGS[{index}]"])
    keys = [leaf.rpartition("[")[2].rstrip("]") for leaf in leaves]
    for index, key in enumerate(keys):
        if not key.isdecimal() and keys.count(key) == 1:
            aliases.setdefault(key, index)
    return aliases


def leaf_name(number: int, signature: Signature) -> str:
    """Return the shortest name of a leaf: its argument, its key, else its path."""
    leaves = signature.leaves or ()
    aliases = _leaf_aliases(leaves, signature)
    return min((name for name, index in aliases.items() if index == number), key=len)


def _leaf_index(name: str, aliases: Mapping[str, int], count: int) -> int | None:
    number = ordinal(name)
    if name in aliases or number is None:
        return aliases.get(name)
    return number if number < count else None


def _container_argument(names: Sequence[str], signature: Signature) -> Argument | None:
    """Return the argument that contains all inputs as its parts, or None."""
    single = _single_argument(signature)
    if single is None or not (single.keys or single.takes in _CONTAINERS):
        return None
    others = {argument.name for argument in signature.arguments} - {single.name}
    return None if any(name in others or _parse_path(name) for name in names) else single


def _places(
    model: str,
    names: Sequence[str],
    signature: Signature,
    *,
    ordered: bool,
    kept: Collection[str],
) -> dict[str, tuple[str, Path]]:
    """Return the slot of each name, and the path within it; `*n` is the n-th item of `*args`."""
    container = _container_argument(names, signature)
    if container is not None:
        return _part_places(model, names, container, signature)
    slots = _slots(names, signature)
    places = {name: _place(name, slots, signature) for name in names}
    if signature.torchscript and ordered:
        own = [name for name in names if name not in kept]
        chosen = rule(own, signature)
        if chosen is BindingRule.NUMBERS:  # also for a number that is the name of an argument
            numbers = {name: ordinal(name) or 0 for name in own}
            places |= {
                name: (slots[number], ()) if number < len(slots) else None
                for name, number in numbers.items()
            }
        if chosen is BindingRule.ORDER:
            return _ordered_places(model, own, {n: places[n] for n in kept}, slots, signature)
    known = {name: place for name, place in places.items() if place is not None}
    if len(known) == len(names):
        _check_duplicates(model, names, list(known.values()))
        return known
    follows_grammar = any(ordinal(name) is not None or _parse_path(name) for name in names)
    if ordered and not known and not follows_grammar:
        return _ordered_places(model, names, {}, slots, signature)
    unknown = [name for name, place in places.items() if place is None]
    raise BindingError(
        model,
        f"{signature} has no {join_names(unknown)}",
        expected=f"names among {join_names(_valid_names(slots, signature))}",
    )


def _ordered_places(
    model: str,
    names: Sequence[str],
    kept: Mapping[str, tuple[str, Path] | None],
    slots: Sequence[str],
    signature: Signature,
) -> dict[str, tuple[str, Path]]:
    """Assign names in the config's order to the slots that states and controls do not use.

    States and controls whose own name has no slot come last.
    """
    log.warning(
        "model '%s': the input names %s are not all arguments of %s, nor all numbers"
        " (INPUT__0, INPUT__1, …); they are passed in the config's order.",
        model,
        ", ".join(names),
        signature,
    )
    placed = {name: place for name, place in kept.items() if place is not None}
    used = {slot for slot, _ in placed.values()}
    free = [slot for slot in slots if slot not in used]
    ordered = [*names, *(name for name in kept if name not in placed)]
    if len(ordered) > len(free):
        raise BindingError(
            model,
            f"{len(ordered)} inputs do not fit {signature}",
            expected=f"at most {len(free)} inputs",
        )
    return {**{name: (slot, ()) for name, slot in zip(ordered, free, strict=False)}, **placed}


def _part_places(
    model: str, names: Sequence[str], container: Argument, signature: Signature
) -> dict[str, tuple[str, Path]]:
    """Return the places in an argument that contains all inputs, by keys or by numbers."""
    if container.takes is not ArgumentType.DICT:
        numbers = [ordinal(name) for name in names]
        indices = [number for number in numbers if number is not None]
        order = indices if len(indices) == len(names) else range(len(names))
        return {name: (container.name, (index,)) for name, index in zip(names, order, strict=True)}
    if not container.keys:
        return {name: (container.name, (name,)) for name in names}
    keys = [key.name for key in container.keys]
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
    places: dict[str, tuple[str, Path]] = {
        name: (container.name, (aliases[name],)) for name in names
    }
    _check_duplicates(model, names, list(places.values()))
    return places


def _single_argument(signature: Signature) -> Argument | None:
    """Return the only argument, or the only one without a default; None if there are several."""
    required = [
        argument for argument in signature.arguments if argument.required
    ] or signature.arguments
    return required[0] if len(required) == 1 else None


def _slots(names: Sequence[str], signature: Signature) -> list[str]:
    """Return the numbered slots: positional arguments, and items of `*args` for all names."""
    slots = [
        argument.name for argument in signature.arguments if argument.passing is Passing.POSITIONAL
    ]
    if any(argument.passing is Passing.REST for argument in signature.arguments):
        slots += [f"*{index}" for index in range(len(slots), len(names))]
    return slots


def _place(name: str, slots: Sequence[str], signature: Signature) -> tuple[str, Path] | None:
    named = {argument.name for argument in signature.arguments if argument.passing in _NAMED}
    any_name = any(argument.passing is Passing.REST_BY_NAME for argument in signature.arguments)
    if name in named:
        return name, ()
    if is_path(name):
        return _path_place(name, slots, named, any_name=any_name)
    owners = [
        argument.name
        for argument in signature.arguments
        if name in {key.name for key in argument.keys}
    ]
    number = ordinal(name)
    if len(owners) == 1:
        return owners[0], (name,)
    if number is not None and number < len(slots):
        name = slots[number]
    elif not any_name:
        return None
    return name, ()


def _path_place(
    name: str, slots: Sequence[str], named: Collection[str], *, any_name: bool
) -> tuple[str, Path] | None:
    root, keys = _parse_path(name) or ("", ())
    if root == "ARGS" and keys and isinstance(keys[0], int) and keys[0] < len(slots):
        return slots[keys[0]], keys[1:]
    if root == "KWARGS" and keys and (any_name or str(keys[0]) in named):
        return str(keys[0]), keys[1:]
    return None


def _check_duplicates(model: str, names: Sequence[str], places: Sequence[tuple[str, Path]]) -> None:
    if len(set(places)) < len(places):
        raise BindingError(
            model,
            f"two of the inputs {join_names(names)} feed the same argument",
            expected="one input for each",
        )


def _valid_names(slots: Sequence[str], signature: Signature) -> list[str]:
    names = [argument.name for argument in signature.arguments if argument.passing in _NAMED]
    names += [key.name for argument in signature.arguments for key in argument.keys]
    names += [f"INPUT__{index}" for index in range(len(slots))]
    return names + [f"ARGS[{index}]" for index in range(len(slots))]


def _assemble(
    model: str,
    places: Mapping[str, tuple[str, Path]],
    signature: Signature,
    left_out: Collection[str],
) -> InputBinding:
    """Pass arguments by position up to the first one without input, then by keyword."""
    fed: dict[str, dict[Path, str]] = {}
    for name, (slot, path) in places.items():
        if name not in left_out:
            fed.setdefault(slot, {})[path] = name
    _check_keys(model, fed, signature)
    _check_tuples(model, places, signature, left_out)
    filled = _filled(model, fed, signature, left_out)
    order = [
        argument.name for argument in signature.arguments if argument.passing is Passing.POSITIONAL
    ]
    order += sorted((slot for slot in fed if slot.startswith("*")), key=lambda slot: int(slot[1:]))
    leading: list[str] = []
    for slot in order:
        if slot not in filled:
            break
        leading.append(slot)
    trailing = [slot for slot in filled if slot not in leading]
    rest = [int(slot[1:]) for slot in order if slot.startswith("*")]
    first = len(order) - len(rest)
    unnamed = {argument.name for argument in signature.arguments if argument.unnamed}
    consecutive = rest == list(range(first, first + len(rest)))
    if not consecutive or any(slot in unnamed or slot.startswith("*") for slot in trailing):
        raise BindingError(model, f"inputs for * of {signature} leave a gap before them")
    names: list[str] = []
    arguments = {argument.name: argument for argument in signature.arguments}
    templates = {
        slot: _argument_template(model, arguments.get(slot), filled[slot], names)
        for slot in (*leading, *trailing)
    }
    takes = _takes(signature, places)
    return InputBinding(
        tuple(names),
        tuple(takes[name] for name in names),
        _caller(
            [templates[slot] for slot in leading], {slot: templates[slot] for slot in trailing}
        ),
        tuple(path_text(*places[name]) for name in names),
    )


def _argument_template(
    model: str, argument: Argument | None, feeds: Mapping[Path, str], names: list[str]
) -> Template | None:
    """Return the template of an argument in its container type.

    Args:
        model: the model's name.
        argument: the argument; None for an item of `*args` or `**kwargs`.
        feeds: the inputs of the argument, by their paths in it.
        names: the names of all columns so far; those of this argument are appended.
    """
    takes = argument.takes if argument is not None else ArgumentType.TENSOR
    if takes is ArgumentType.DICT:  # all keys are strings
        feeds = {(str(path[0]), *path[1:]) if path else path: feeds[path] for path in feeds}
    template = _template(model, feeds, names)
    if takes is ArgumentType.TUPLE and isinstance(template, list):
        return tuple(template)
    if argument is not None and isinstance(template, dict):
        # Required keys that allow None.
        empty = [key.name for key in argument.keys if key.required and key.nullable]
        return {**dict.fromkeys(empty), **template}  # type: ignore[dict-item]
    return template


def _check_keys(model: str, fed: Mapping[str, Mapping[Path, str]], signature: Signature) -> None:
    """Raise if inputs feed unknown keys of a TypedDict, or not all required ones."""
    for argument in signature.arguments:
        if not argument.keys or argument.name not in fed:
            continue
        names = {str(path[0]) if path else "" for path in fed[argument.name]}
        needed = [key.name for key in argument.keys if key.required and not key.nullable]
        if not set(needed) <= names or not names <= {key.name for key in argument.keys}:
            raise BindingError(
                model,
                f"the inputs {join_names(fed[argument.name].values())} do not make the dict"
                f" {argument.name} of {signature}",
                expected=f"inputs for its keys {join_names(key.name for key in argument.keys)}",
            )


def _check_tuples(
    model: str,
    places: Mapping[str, tuple[str, Path]],
    signature: Signature,
    left_out: Collection[str],
) -> None:
    """Raise if only some parts of an optional tuple are left out."""
    for argument in signature.arguments:
        if argument.takes is not ArgumentType.TUPLE or (
            argument.required and not argument.nullable
        ):
            continue
        parts = [name for name, (slot, _) in places.items() if slot == argument.name]
        missing = [name for name in parts if name in left_out]
        if missing and len(missing) < len(parts):
            raise BindingError(
                model,
                f"{argument.name} of {signature} is a tuple, and {join_names(missing)} are left out"
                " of it",
                expected=f"all of {join_names(parts)}, or none of them",
            )


def _filled(
    model: str,
    fed: Mapping[str, dict[Path, str]],
    signature: Signature,
    left_out: Collection[str],
) -> dict[str, dict[Path, str]]:
    """Return the inputs of each argument; none for a required argument that allows None."""
    filled = dict(fed)
    for argument in signature.arguments:
        if argument.name in fed or not argument.required:
            continue
        if argument.passing in (Passing.REST, Passing.REST_BY_NAME):
            continue
        if argument.nullable:
            filled[argument.name] = {}
            continue
        optional = f"; {join_names(left_out)} cannot be optional" if left_out else ""
        raise BindingError(
            model,
            f"no input feeds {signature.name}()'s argument {argument.name}{optional}",
            expected=f"inputs for {signature}",
            cure="Add them to config.pbtxt, or give the arguments defaults.",
        )
    return filled


def _takes(signature: Signature, places: Mapping[str, tuple[str, Path]]) -> dict[str, ArgumentType]:
    """Return the type of each column: that of its argument or key, a tensor within containers."""
    types = {
        **signature.by_name,
        **{argument.name: argument.takes for argument in signature.arguments},
    }
    keys: dict[tuple[str, Path], ArgumentType] = {
        (argument.name, (key.name,)): key.takes
        for argument in signature.arguments
        for key in argument.keys
    }
    columns = {}
    for name, (slot, path) in places.items():
        takes = (
            keys.get((slot, path), ArgumentType.TENSOR)
            if path
            else types.get(slot, ArgumentType.TENSOR)
        )
        columns[name] = ArgumentType.TENSOR if takes in _CONTAINERS else takes
    return columns


def _template(model: str, feeds: Mapping[Path, str], names: list[str]) -> Template | None:
    """Return the tree of one argument; the name of each leaf is appended to `names`."""
    if not feeds:
        return None
    if () in feeds:
        if len(feeds) > 1:
            raise BindingError(
                model, f"{join_names(feeds.values())} feed an argument and a part of it at once"
            )
        names.append(feeds[()])
        return len(names) - 1
    branches: dict[int | str, dict[Path, str]] = {}
    for path, name in feeds.items():
        branches.setdefault(path[0], {})[path[1:]] = name
    if all(isinstance(key, int) for key in branches):
        if sorted(branches, key=int) != list(range(len(branches))):
            raise BindingError(
                model,
                f"{join_names(feeds.values())} leave gaps in a list",
                expected=f"items 0 to {len(branches) - 1}",
            )
        return [_template(model, branches[index], names) for index in range(len(branches))]  # type: ignore[misc]
    return {str(key): _template(model, branch, names) for key, branch in branches.items()}  # type: ignore[misc]


def _caller(
    positional: Sequence[Template | None], keywords: Mapping[str, Template | None]
) -> Callable[[Callable[..., Any], Sequence[Any]], Any]:
    if list(positional) == list(range(len(positional))) and not keywords:
        return lambda module, columns: module(*columns)

    def call(module: Callable[..., Any], columns: Sequence[Any]) -> Any:
        args = [_fill(template, columns) for template in positional]
        kwargs = {name: _fill(template, columns) for name, template in keywords.items()}
        return module(*args, **kwargs)

    return call


def _fill(template: Any, columns: Sequence[Any]) -> Any:
    if isinstance(template, int):
        return columns[template]
    if isinstance(template, dict):
        return {key: _fill(value, columns) for key, value in template.items()}
    if isinstance(template, list | tuple):
        return type(template)(_fill(value, columns) for value in template)
    return template  # None
