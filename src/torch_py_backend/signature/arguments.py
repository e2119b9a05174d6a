"""The arguments of forward(), and the grammar of the names that stand for them.

The name of an input is, in this order: an argument of forward(); a path, `ARGS[0]`, `ARGS[2][key]`
or `KWARGS[name]`; or `<name>__<number>`, an argument's number (a leaf's, with an own call tree).
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Passing: TypeAlias = inspect._ParameterKind  # noqa: SLF001  has no public name
# Keys from an argument (or the result) down to a leaf.
Path: TypeAlias = tuple[int | str, ...]
# A leaf of the call tree: its slot, and the path within. A slot is the name of an argument, or `*n`
# for the n-th positional argument if `*args` contains it.
Place: TypeAlias = tuple[str, Path]

# As in LibTorch: digits after the first two underscores. Bounds prevent long lists and recursion.
_ORDINAL = re.compile(r"(?:(?!__).)*__([0-9]{1,4})")
_PATH = re.compile(r"(ARGS|KWARGS|RESULT)((?:\[[^\[\]]+\]){0,64})")


def ordinal(name: str) -> int | None:
    """Return the number in `<name>__<number>`, or None."""
    match = _ORDINAL.fullmatch(name)
    return int(match[1]) if match else None


def is_path(name: str) -> bool:
    return _PATH.fullmatch(name) is not None


def path_text(root: str, path: Sequence[int | str]) -> str:
    """Return the text of a path: `ARGS[2][key]`."""
    return root + "".join(f"[{key}]" for key in path)


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


# The types whose parts are tensors, which may be separate inputs.
CONTAINERS = (ArgumentType.DICT, ArgumentType.LIST, ArgumentType.TUPLE)
VARIADIC = (Passing.VAR_POSITIONAL, Passing.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of forward(), a tensor without annotation; `nullable`: it may be None."""

    name: str
    required: bool = True
    passing: Passing = Passing.POSITIONAL_OR_KEYWORD
    type: ArgumentType = ArgumentType.TENSOR
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """The signature of a loaded artifact.

    Attributes:
        text: the declaration of the arguments, for messages.
        leaves: for an artifact that contains its own call tree: the arguments, which are its
            tensors, by their paths. None: the call tree follows from the inputs.
        unflatten: builds (args, kwargs) of such a tree from its leaves; None: they are arguments.
        name: the name of the function, for messages.
        torchscript: it is TorchScript: names follow LibTorch's rule, strings may be any bytes.
        settings: names that `**` takes as values, not as tensors.
    """

    arguments: tuple[Argument, ...]
    text: str = ""
    leaves: Mapping[str, str] | None = None
    unflatten: Callable[..., Any] | None = None
    name: str = "forward"
    torchscript: bool = False
    settings: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name + self.text

    @property
    def named(self) -> list[str]:
        """The names of the arguments, without `*` and `**`."""
        return [entry.name for entry in self.arguments if entry.passing not in VARIADIC]

    def container_argument(self, names: Sequence[str]) -> Argument | None:
        """Return the only argument that is needed, if all inputs are its parts; else None."""
        needed = [entry for entry in self.arguments if entry.required] or self.arguments
        if len(needed) != 1 or needed[0].type not in CONTAINERS:
            return None
        others = {*self.named} - {needed[0].name}
        return None if any(name in others or is_path(name) for name in names) else needed[0]

    def has(self, passing: Passing) -> bool:
        return any(argument.passing is passing for argument in self.arguments)

    def slots(self, count: int) -> list[str]:
        """Return the numbered slots for `count` names: positional arguments, items of `*args`."""
        positional = (Passing.POSITIONAL_ONLY, Passing.POSITIONAL_OR_KEYWORD)
        slots = [entry.name for entry in self.arguments if entry.passing in positional]
        if self.has(Passing.VAR_POSITIONAL):
            slots += [f"*{index}" for index in range(len(slots), count)]
        return slots

    def place(self, name: str) -> Place | None:
        """Return the leaf that a name stands for, whatever the other names are; None: no leaf."""
        name = (self.leaves or {}).get(name, name)
        if name in self.named:
            return name, ()
        number = ordinal(name)
        keys = list[int | str]()
        path = _PATH.fullmatch(name)
        if path is not None and self.leaves is None:
            texts = path[2][1:-1].split("][")
            first, *keys = [int(t) if re.fullmatch("[0-9]{1,4}", t) else t for t in texts]
            any_keyword = isinstance(first, str) and first and self.has(Passing.VAR_KEYWORD)
            if path[1] == "KWARGS" and (first in self.named or any_keyword):
                return str(first), tuple(keys)
            number = first if path[1] == "ARGS" and isinstance(first, int) else None
        if number is not None and number < len(slots := self.slots(number + 1)):
            return slots[number], tuple(keys)
        return (name, ()) if self.has(Passing.VAR_KEYWORD) and path is None else None
