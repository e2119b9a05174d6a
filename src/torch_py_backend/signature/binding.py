"""Input names tied to the leaves of forward()'s call tree; `results` does it for its result.

One grammar for all artifacts. An input's name is, in this order: an argument of forward();
a path, `ARGS[0]`, `ARGS[2][key]`, `KWARGS[name]`; or `<name>__<number>`, the number of an
argument (of a leaf, where the artifact carries its own call tree). Where no name fits, the
config's order decides, with a warning.

TorchScript follows the rule of Triton's LibTorch backend: either all names are arguments, or all
are numbers, else the config's order decides for all of them. Paths, which that backend does not
have, keep their meaning.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch_py_backend.errors import BindingError, shown

log = logging.getLogger(__name__)

# Keys from an argument (or the result) down to a leaf.
Path: TypeAlias = tuple[int | str, ...]
# A call tree with column numbers for leaves.
Template: TypeAlias = "int | list[Template] | tuple[Template, ...] | dict[str, Template]"

# As LibTorch reads it: digits alone after the first two underscores.
_ORDINAL = re.compile(r"(?:(?!__).)*__([0-9]+)")
_PATH = re.compile(r"(ARGS|KWARGS|RESULT)((?:\[[^\[\]]+\])*)")


class Passing(enum.Enum):
    """How an argument is passed; `inspect.Parameter`'s kinds, less their history."""

    POSITIONAL = "positional"
    KEYWORD = "keyword"
    REST = "*"
    REST_BY_NAME = "**"


class Takes(enum.Enum):
    """What an argument takes, as its annotation says."""

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
            Takes.INT,
            Takes.FLOAT,
            Takes.BOOL,
            Takes.STR,
            Takes.RAW,
            Takes.VALUE,
        )

    @property
    def raw(self) -> bool:
        """Bytes as they came, not decoded."""
        return self in (Takes.RAW, Takes.BYTES, Takes.NESTED_BYTES)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of forward().

    Attributes:
        name: its name.
        required: it has no default.
        passing: how it is passed.
        takes: what it takes; what is not annotated takes a tensor.
        text: its declaration, for messages.
        nullable: its annotation allows None.
        unnamed: it cannot be passed by its name.
        keys: what a dict of known keys holds (a TypedDict); each is fed by itself.
    """

    name: str
    required: bool
    passing: Passing
    takes: Takes
    text: str
    nullable: bool = False
    unnamed: bool = False
    keys: tuple[Argument, ...] = ()


@dataclass(frozen=True, slots=True)
class Signature:
    """What a loaded artifact takes.

    Attributes:
        arguments: forward()'s arguments.
        leaves: for an artifact that carries its own call tree: where its tensors stand in it, as
            the texts of their paths, in its order. None: a tree that takes what is put in.
        unflatten: makes (args, kwargs) of such a tree from its leaves.
        name: what the function is called, for messages.
        torchscript: it is TorchScript: names follow LibTorch's rule, strings may be any bytes.
        by_name: what `**` takes under the names that it is known to take.
    """

    arguments: tuple[Argument, ...]
    leaves: tuple[str, ...] | None = None
    unflatten: Callable[[Sequence[Any]], tuple[Sequence[Any], Mapping[str, Any]]] | None = None
    name: str = "forward"
    torchscript: bool = False
    by_name: Mapping[str, Takes] = field(default_factory=dict)

    def __str__(self) -> str:
        """The function as its author wrote it."""
        texts = [one.text for one in self.arguments]
        kinds = [one.passing for one in self.arguments]
        if Passing.KEYWORD in kinds and Passing.REST not in kinds:
            texts.insert(kinds.index(Passing.KEYWORD), "*")
        return f"{self.name}({', '.join(texts)})"


@dataclass(frozen=True, slots=True)
class Inputs:
    """How the columns of a batch are passed.

    Attributes:
        names: tensor names in the order in which `call` takes their columns.
        takes: what each column becomes before it is passed.
        call: calls a module with the columns.
        places: where each column goes, for people: an argument, or a path.
    """

    names: tuple[str, ...]
    takes: tuple[Takes, ...]
    call: Callable[[Callable[..., Any], Sequence[Any]], Any]
    places: tuple[str, ...] = ()


class Rule(enum.Enum):
    """What ties input names to arguments; the values are for people."""

    ARGUMENTS = "by argument name"
    NUMBERS = "by number"
    KEYS = "as the parts of one argument"
    ORDER = "in the config's order"
    OWN = "each name by itself"


def rule(names: Sequence[str], signature: Signature) -> Rule:
    """What ties the config's input names to arguments; those that the config does not fix left out.

    Args:
        names: what requests bring.
        signature: what the artifact takes.
    """
    called = {one.name for one in signature.arguments if one.passing in _NAMED}
    if signature.leaves is None and _parts_of(names, signature) is not None:
        return Rule.KEYS
    if called.issuperset(names):
        return Rule.ARGUMENTS
    if all(ordinal(name) is not None for name in names):
        return Rule.NUMBERS
    slots = _slots(names, signature)
    fits = any(_place(name, slots, signature) is not None for name in names)
    if signature.leaves is not None or any(map(_parse_path, names)):
        return Rule.OWN
    return Rule.OWN if fits and not signature.torchscript else Rule.ORDER


def ordinal(name: str) -> int | None:
    """The number in `<name>__<number>`, or None."""
    match = _ORDINAL.fullmatch(name)
    return int(match[1]) if match else None


def path_text(root: str, path: Path) -> str:
    """A path as users write it: `ARGS[2][key]`."""
    return root + "".join(f"[{key}]" for key in path)


def is_path(name: str) -> bool:
    """Whether a name is written as a path."""
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
) -> Inputs:
    """Tie the config's input names to the leaves of forward()'s call tree.

    Args:
        model: the model's name.
        names: input names in the config's order.
        signature: what the artifact takes.
        left_out: names that are not there this time: `optional: true` in the config.
        ordered: whether their order decides where no name fits.
        kept: names of states and controls of sequences, which no request brings: each is bound by
            itself, whatever ties the others.

    Raises:
        BindingError: a name that leads nowhere, a leaf that nobody feeds or that two names feed.
    """
    if len(set(names)) < len(names):
        raise BindingError(model, f"the inputs {shown(names)} carry the same name twice")
    if signature.leaves is not None:
        return _bind_closed(model, names, signature, left_out)
    places = _places(model, names, signature, ordered=ordered, kept=kept)
    return _assemble(model, places, signature, left_out)


def among(names: Sequence[str], more: Sequence[str], signature: Signature) -> list[str]:
    """Those of `more` that forward() has a place for, beside the inputs `names`."""
    if signature.leaves is not None:
        aliases = _leaf_aliases(signature.leaves, signature)
        count = len(signature.leaves)
        return [name for name in more if _leaf_named(name, aliases, count) is not None]
    only = _only_argument(signature)
    if only is not None and only.takes is Takes.DICT:
        return list(more)
    slots = _slots([*names, *more], signature)
    return [name for name in more if _place(name, slots, signature) is not None]


def _bind_closed(
    model: str, names: Sequence[str], signature: Signature, left_out: Collection[str]
) -> Inputs:
    """The artifact's own tree: each of its leaves must be fed."""
    leaves = signature.leaves or ()
    unflatten = signature.unflatten
    aliases = _leaf_aliases(leaves, signature)
    positions = [_leaf_named(name, aliases, len(leaves)) for name in names]
    found = [index for index in positions if index is not None]
    if not found and len(names) == len(leaves) == 1:
        found = [0]  # there is nothing to be mistaken for
    chosen = dict(zip(found, names, strict=False))
    if len(chosen) < len(names) or chosen.keys() != set(range(len(leaves))) or unflatten is None:
        valid = [*leaves, *(f"INPUT__{index}" for index in range(len(leaves)))]
        raise BindingError(
            model,
            f"the inputs {shown(names)} do not feed each tensor of {signature} once",
            expected=f"{len(leaves)} inputs with names among {shown(valid)}",
        )
    if left_out:
        raise BindingError(
            model,
            f"input {shown(left_out)} is optional, and {signature} has no defaults",
            cure="Take `optional` out of config.pbtxt.",
        )

    def call(module: Callable[..., Any], columns: Sequence[Any]) -> Any:
        args, kwargs = unflatten(columns)
        return module(*args, **kwargs)

    ordered = tuple(chosen[index] for index in range(len(leaves)))
    return Inputs(ordered, (Takes.TENSOR,) * len(ordered), call, tuple(leaves))


def _leaf_aliases(leaves: Sequence[str], signature: Signature) -> dict[str, int]:
    """Every name that leads to a leaf: its path, its number, its argument, its last key."""
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
    """The shortest name that leads to a leaf: an argument's, a key, else its path."""
    leaves = signature.leaves or ()
    aliases = _leaf_aliases(leaves, signature)
    return min((name for name, index in aliases.items() if index == number), key=len)


def _leaf_named(name: str, aliases: Mapping[str, int], count: int) -> int | None:
    number = ordinal(name)
    if name in aliases or number is None:
        return aliases.get(name)
    return number if number < count else None


def _parts_of(names: Sequence[str], signature: Signature) -> Argument | None:
    """The one argument that all inputs are parts of; None: they are arguments themselves."""
    only = _only_argument(signature)
    called = {one.name for one in signature.arguments}
    if only is None or not (only.keys or only.takes in (Takes.DICT, Takes.LIST, Takes.TUPLE)):
        return None
    others = any(_parse_path(name) or (name in called and name != only.name) for name in names)
    return None if others else only


def _places(
    model: str,
    names: Sequence[str],
    signature: Signature,
    *,
    ordered: bool,
    kept: Collection[str],
) -> dict[str, tuple[str, Path]]:
    """Tensor name → the slot that it feeds, and the path within; `*n` is the n-th of `*args`."""
    only = _parts_of(names, signature)
    if only is not None:
        if only.keys:
            return _key_places(model, names, only, signature)
        if only.takes is Takes.DICT:
            return {name: (only.name, (name,)) for name in names}
        numbers = [ordinal(name) for name in names]
        order = range(len(names)) if None in numbers else numbers
        return {name: (only.name, (index,)) for name, index in zip(names, order, strict=True)}  # type: ignore[misc]
    slots = _slots(names, signature)
    places = {name: _place(name, slots, signature) for name in names}
    if signature.torchscript and ordered:
        brought = [name for name in names if name not in kept]
        decides = rule(brought, signature)
        if decides is Rule.NUMBERS:  # also of what is an argument's name by chance
            places |= {name: _numbered(name, slots) for name in brought}
        if decides is Rule.ORDER:
            return _ordered_places(model, brought, {n: places[n] for n in kept}, slots, signature)
    found = {name: place for name, place in places.items() if place is not None}
    if len(found) == len(names):
        _refuse_twice(model, names, list(found.values()))
        return found
    foreign = not found and not any(
        ordinal(name) is not None or _parse_path(name) for name in names
    )
    if foreign and ordered:
        return _ordered_places(model, names, {}, slots, signature)
    strangers = [name for name, place in places.items() if place is None]
    raise BindingError(
        model,
        f"{signature} has no {shown(strangers)}",
        expected=f"names among {shown(_valid(slots, signature))}",
    )


def _numbered(name: str, slots: Sequence[str]) -> tuple[str, Path] | None:
    number = ordinal(name)
    return (slots[number], ()) if number is not None and number < len(slots) else None


def _ordered_places(
    model: str,
    names: Sequence[str],
    kept: Mapping[str, tuple[str, Path] | None],
    slots: Sequence[str],
    signature: Signature,
) -> dict[str, tuple[str, Path]]:
    """Names in the config's order, in the slots that states and controls leave.

    Those of them that have no slot by their own name come last.
    """
    _warn_order(model, names, signature)
    placed = {name: place for name, place in kept.items() if place is not None}
    taken = {slot for slot, _ in placed.values()}
    free = [slot for slot in slots if slot not in taken]
    ordered = [*names, *(name for name in kept if name not in placed)]
    if len(ordered) > len(free):
        raise BindingError(
            model,
            f"{len(ordered)} inputs do not fit {signature}",
            expected=f"at most {len(free)} inputs",
        )
    return {**{name: (slot, ()) for name, slot in zip(ordered, free, strict=False)}, **placed}


def _key_places(
    model: str, names: Sequence[str], only: Argument, signature: Signature
) -> dict[str, tuple[str, Path]]:
    """The keys of the one argument, by their names or numbers."""
    keys = [one.name for one in only.keys]
    aliases = {key: key for key in keys}
    for name in names:
        number = ordinal(name)
        if number is not None and number < len(keys):
            aliases.setdefault(name, keys[number])
    strangers = [name for name in names if name not in aliases]
    if strangers:
        raise BindingError(
            model,
            f"{only.name} of {signature} has no key {shown(strangers)}",
            expected=f"names among {shown(keys)}",
        )
    places: dict[str, tuple[str, Path]] = {name: (only.name, (aliases[name],)) for name in names}
    _refuse_twice(model, names, list(places.values()))
    return places


def _only_argument(signature: Signature) -> Argument | None:
    """The one argument that must be fed: the only one, or the only one without a default."""
    required = [one for one in signature.arguments if one.required] or signature.arguments
    return required[0] if len(required) == 1 else None


def _slots(names: Sequence[str], signature: Signature) -> list[str]:
    """What can be numbered: positional arguments, and as many of `*args` as names may need."""
    slots = [one.name for one in signature.arguments if one.passing is Passing.POSITIONAL]
    if any(one.passing is Passing.REST for one in signature.arguments):
        slots += [f"*{index}" for index in range(len(slots), len(names))]
    return slots


_NAMED = (Passing.POSITIONAL, Passing.KEYWORD)


def _place(name: str, slots: Sequence[str], signature: Signature) -> tuple[str, Path] | None:
    named = {one.name for one in signature.arguments if one.passing in _NAMED}
    takes_any_name = any(one.passing is Passing.REST_BY_NAME for one in signature.arguments)
    if name in named:
        return name, ()
    if is_path(name):
        return _path_place(name, slots, named, any_name=takes_any_name)
    owners = [one.name for one in signature.arguments if name in {key.name for key in one.keys}]
    number = ordinal(name)
    if len(owners) == 1:
        return owners[0], (name,)
    if number is not None and number < len(slots):
        name = slots[number]
    elif not takes_any_name:
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


def _refuse_twice(model: str, names: Sequence[str], places: Sequence[tuple[str, Path]]) -> None:
    if len(set(places)) < len(places):
        raise BindingError(
            model,
            f"two of the inputs {shown(names)} feed the same argument",
            expected="one input for each",
        )


def _warn_order(model: str, names: Sequence[str], signature: Signature) -> None:
    log.warning(
        "model '%s': the input names %s are not all arguments of %s, nor all numbers"
        " (INPUT__0, INPUT__1, …); they are passed in the config's order.",
        model,
        ", ".join(names),
        signature,
    )


def _valid(slots: Sequence[str], signature: Signature) -> list[str]:
    names = [one.name for one in signature.arguments if one.passing in _NAMED]
    names += [key.name for one in signature.arguments for key in one.keys]
    names += [f"INPUT__{index}" for index in range(len(slots))]
    return names + [f"ARGS[{index}]" for index in range(len(slots))]


def _assemble(
    model: str,
    places: Mapping[str, tuple[str, Path]],
    signature: Signature,
    left_out: Collection[str],
) -> Inputs:
    """Positional up to the first argument that is left out, by keyword from there."""
    fed: dict[str, dict[Path, str]] = {}
    for name, (slot, path) in places.items():
        if name not in left_out:
            fed.setdefault(slot, {})[path] = name
    _check_keys(model, fed, signature)
    _check_tuples(model, places, signature, left_out)
    filled = _filled(model, fed, signature, left_out)
    order = [one.name for one in signature.arguments if one.passing is Passing.POSITIONAL]
    order += sorted((slot for slot in fed if slot.startswith("*")), key=lambda slot: int(slot[1:]))
    leading: list[str] = []
    for slot in order:
        if slot not in filled:
            break
        leading.append(slot)
    trailing = [slot for slot in filled if slot not in leading]
    rest = [int(slot[1:]) for slot in order if slot.startswith("*")]
    first = len(order) - len(rest)
    unnamed = {one.name for one in signature.arguments if one.unnamed}
    if rest != list(range(first, first + len(rest))) or unnamed & set(trailing):
        raise BindingError(model, f"inputs for * of {signature} leave a gap before them")
    if any(slot.startswith("*") for slot in trailing):
        raise BindingError(model, f"inputs for * of {signature} leave a gap before them")
    names: list[str] = []
    arguments = {one.name: one for one in signature.arguments}
    templates = {
        slot: _argument_template(model, arguments.get(slot), filled[slot], names)
        for slot in (*leading, *trailing)
    }
    takes = _takes(signature, places)
    return Inputs(
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
    """What is passed for an argument, in the container that it takes; None for one of `*`."""
    takes = argument.takes if argument is not None else Takes.TENSOR
    if takes is Takes.DICT:  # where every key is a string
        feeds = {(str(path[0]), *path[1:]) if path else path: feeds[path] for path in feeds}
    template = _template(model, feeds, names)
    if takes is Takes.TUPLE and isinstance(template, list):
        return tuple(template)
    if argument is not None and isinstance(template, dict):
        # What must be there may be None all the same.
        empty = [key.name for key in argument.keys if key.required and key.nullable]
        return {**dict.fromkeys(empty), **template}  # type: ignore[dict-item]
    return template


def _check_keys(model: str, fed: Mapping[str, Mapping[Path, str]], signature: Signature) -> None:
    """Inputs feed known keys of a dict, and each that must be there."""
    for one in signature.arguments:
        if not one.keys or one.name not in fed:
            continue
        names = {str(path[0]) if path else "" for path in fed[one.name]}
        needed = [key.name for key in one.keys if key.required and not key.nullable]
        if not set(needed) <= names or not names <= {key.name for key in one.keys}:
            raise BindingError(
                model,
                f"the inputs {shown(fed[one.name].values())} do not make the dict {one.name} of"
                f" {signature}",
                expected=f"inputs for its keys {shown(key.name for key in one.keys)}",
            )


def _check_tuples(
    model: str,
    places: Mapping[str, tuple[str, Path]],
    signature: Signature,
    left_out: Collection[str],
) -> None:
    """A tuple that need not be passed is passed with all its parts or not at all."""
    for one in signature.arguments:
        if one.takes is not Takes.TUPLE or (one.required and not one.nullable):
            continue
        parts = [name for name, (slot, _) in places.items() if slot == one.name]
        missing = [name for name in parts if name in left_out]
        if missing and len(missing) < len(parts):
            raise BindingError(
                model,
                f"{one.name} of {signature} is a tuple, and {shown(missing)} are left out of it",
                expected=f"all of {shown(parts)}, or none of them",
            )


def _filled(
    model: str,
    fed: Mapping[str, dict[Path, str]],
    signature: Signature,
    left_out: Collection[str],
) -> dict[str, dict[Path, str]]:
    """What feeds each argument; an argument that may be None and has no default gets nothing."""
    filled = dict(fed)
    for one in signature.arguments:
        if one.name in fed or not one.required:
            continue
        if one.passing in (Passing.REST, Passing.REST_BY_NAME):
            continue
        if one.nullable:
            filled[one.name] = {}
            continue
        optional = f"; {shown(left_out)} cannot be optional" if left_out else ""
        raise BindingError(
            model,
            f"no input feeds {signature.name}()'s argument {one.name}{optional}",
            expected=f"inputs for {signature}",
            cure="Add them to config.pbtxt, or give the arguments defaults.",
        )
    return filled


def _takes(signature: Signature, places: Mapping[str, tuple[str, Path]]) -> dict[str, Takes]:
    """What a column becomes: an argument's own kind, a tensor within its containers."""
    kinds = {**signature.by_name, **{one.name: one.takes for one in signature.arguments}}
    keys: dict[tuple[str, Path], Takes] = {
        (one.name, (key.name,)): key.takes for one in signature.arguments for key in one.keys
    }
    containers = (Takes.DICT, Takes.LIST, Takes.TUPLE)
    found = {}
    for name, (slot, path) in places.items():
        kind = keys.get((slot, path), Takes.TENSOR) if path else kinds.get(slot, Takes.TENSOR)
        found[name] = Takes.TENSOR if kind in containers else kind
    return found


def _template(model: str, feeds: Mapping[Path, str], names: list[str]) -> Template | None:
    """The tree of one argument; each leaf is the number of its column, appended to `names`."""
    if not feeds:
        return None
    if () in feeds:
        if len(feeds) > 1:
            raise BindingError(
                model, f"{shown(feeds.values())} feed an argument and a part of it at once"
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
                f"{shown(feeds.values())} leave gaps in a list",
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
