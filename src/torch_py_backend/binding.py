"""Tensor names tied to forward()'s arguments and to the parts of its result.

How a name is resolved is LibTorch's rule, for inputs: the name of an argument; else
`<anything>__<number>`, the argument's index; else the order in the config. For outputs: a key or
field of the result; else `<anything>__<number>`; else the order in the config.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch_py_backend.errors import BindingError, shown

log = logging.getLogger(__name__)

_ORDINAL = re.compile(r".+__(\d+)")


class Passing(enum.Enum):
    """How an argument is passed; `inspect.Parameter`'s kinds, less their history."""

    POSITIONAL = "positional"
    KEYWORD = "keyword"
    REST = "*"
    REST_BY_NAME = "**"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of forward().

    Attributes:
        name: its name.
        required: it has no default.
        passing: how it is passed.
        takes_dict: its annotation is a dict of tensors.
        text: its declaration, for messages.
    """

    name: str
    required: bool
    passing: Passing
    takes_dict: bool
    text: str


@dataclass(frozen=True, slots=True)
class Inputs:
    """How the columns of a batch are passed.

    Attributes:
        names: tensor names in the order in which `call` takes their columns.
        call: calls a module with the columns.
    """

    names: tuple[str, ...]
    call: Callable[[Callable[..., Any], Sequence[Any]], Any]


# Takes forward()'s result and gives the configured outputs, in the config's order.
Outputs: TypeAlias = Callable[[Any], Sequence[Any]]


def bind_inputs(model: str, names: Sequence[str], arguments: Sequence[Argument]) -> Inputs:
    """Tie the config's input names to forward()'s arguments.

    Raises:
        BindingError: a name that forward() does not have, an argument that nobody feeds.
    """
    positional = [one for one in arguments if one.passing is Passing.POSITIONAL]
    if len(arguments) == 1 and arguments[0].takes_dict:
        return _as_dict(tuple(names))
    chosen = _choose(model, names, arguments, positional)
    missing = [one.name for one in arguments if one.required and one.name not in chosen]
    if missing:
        raise BindingError(
            model,
            f"no input feeds forward()'s argument {shown(missing)}",
            expected=f"inputs for {_signature(arguments)}",
            cure="Add them to config.pbtxt, or give the arguments defaults.",
        )
    return _as_call(chosen, positional)


def _choose(
    model: str,
    names: Sequence[str],
    arguments: Sequence[Argument],
    positional: Sequence[Argument],
) -> dict[str, str]:
    """Argument name → tensor name; `*n` stands for the n-th of `*args`."""
    by_name = {one.name for one in arguments if one.passing in _NAMED}
    takes_any_name = any(one.passing is Passing.REST_BY_NAME for one in arguments)
    matched = [name for name in names if name in by_name]
    indices = [index for index in map(ordinal, names) if index is not None]
    numbered = len(indices) == len(names) and positional
    if len(matched) == len(names) or (takes_any_name and not numbered):
        return {name: name for name in names}
    if len(indices) == len(names):
        return _by_index(model, names, indices, arguments)
    if matched or indices:
        strangers = [name for name in names if name not in by_name]
        raise BindingError(
            model,
            f"forward() has no argument {shown(strangers)}",
            expected=f"names among {_valid(positional, arguments)}",
            cure=f"forward() is {_signature(arguments)}.",
        )
    log.warning(
        "model '%s': the input names %s are not arguments of %s; they are passed in the config's"
        " order.",
        model,
        ", ".join(names),
        _signature(arguments),
    )
    return _by_index(model, names, list(range(len(names))), arguments)


_NAMED = (Passing.POSITIONAL, Passing.KEYWORD)


def ordinal(name: str) -> int | None:
    """The number in `<anything>__<number>`, or None."""
    match = _ORDINAL.fullmatch(name)
    return int(match[1]) if match else None


def _by_index(
    model: str, names: Sequence[str], indices: Sequence[int], arguments: Sequence[Argument]
) -> dict[str, str]:
    slots = [one.name for one in arguments if one.passing is Passing.POSITIONAL]
    if any(one.passing is Passing.REST for one in arguments):
        # Without a gap: as many inputs as there are, or as the arguments before * need.
        slots += [f"*{index}" for index in range(len(slots), len(names))]
    wrong = [name for name, index in zip(names, indices, strict=True) if index >= len(slots)]
    if wrong:
        raise BindingError(
            model,
            f"input {shown(wrong)} points past the arguments of {_signature(arguments)}",
            expected=f"at most {len(slots)} inputs, numbered from 0",
        )
    if len(set(indices)) < len(indices):
        raise BindingError(model, f"the inputs {shown(names)} carry the same number twice")
    return {slots[index]: name for name, index in zip(names, indices, strict=True)}


def _as_dict(names: tuple[str, ...]) -> Inputs:
    return Inputs(names, lambda module, columns: module(dict(zip(names, columns, strict=True))))


def _as_call(chosen: dict[str, str], positional: Sequence[Argument]) -> Inputs:
    """Positional up to the first argument that is left out, by keyword from there."""
    leading: list[str] = []
    slots = [one.name for one in positional]
    rest = [slot for slot in chosen if slot.startswith("*")]
    slots += sorted(rest, key=lambda slot: int(slot[1:]))
    for slot in slots:
        if slot not in chosen:
            break
        leading.append(slot)
    keywords = tuple(name for name in chosen if name not in leading)
    names = tuple(chosen[argument] for argument in (*leading, *keywords))
    if not keywords:
        return Inputs(names, lambda module, columns: module(*columns))
    count = len(leading)

    def call(module: Callable[..., Any], columns: Sequence[Any]) -> Any:
        return module(*columns[:count], **dict(zip(keywords, columns[count:], strict=True)))

    return Inputs(names, call)


class _Parts(NamedTuple):
    """How the parts of a result are reached.

    Attributes:
        getter: makes a function that takes keys out of a result.
        keys: what it takes, one key a part.
        names: the parts' names; empty where they have none.
        text: what the result is, for messages.
    """

    getter: Callable[..., Callable[[Any], Any]]
    keys: Sequence[Any]
    names: Sequence[str]
    text: str


def bind_outputs(model: str, names: Sequence[str], result: Any) -> Outputs:
    """Tie the config's output names to the parts of a result like this one.

    Args:
        model: the model's name.
        names: output names in the config's order.
        result: what forward() returned for a sample: a tensor; a tuple or list; a mapping; a
            dataclass or named tuple.

    Raises:
        BindingError: a name that the result does not have, or more names than it has parts.
    """
    parts = _parts(result)
    matched = [name for name in names if name in parts.names]
    if len(set(matched)) == len(names):
        return _take(parts, [list(parts.names).index(name) for name in names])
    indices = [index for index in map(ordinal, names) if index is not None]
    if not indices and not matched:
        indices = _in_order(model, names, parts)
    distinct = set(indices)
    if len(distinct) < len(names) or max(distinct) >= len(parts.keys):
        valid = [*parts.names, *(f"OUTPUT__{index}" for index in range(len(parts.keys)))]
        raise BindingError(
            model,
            f"the outputs {shown(names)} do not fit what forward() returns, {parts.text}",
            expected=f"names among {shown(valid)}",
        )
    return _take(parts, indices)


def _in_order(model: str, names: Sequence[str], parts: _Parts) -> list[int]:
    if parts.names:
        log.warning(
            "model '%s': the output names %s are not among the result's %s; they are taken in the"
            " result's order.",
            model,
            ", ".join(names),
            shown(parts.names),
        )
    return list(range(len(names)))


def _take(parts: _Parts, indices: Sequence[int]) -> Outputs:
    if parts.getter is _itself:
        return lambda result: (result,)
    get = parts.getter(*(parts.keys[index] for index in indices))
    if len(indices) > 1:
        return get
    return lambda result: (get(result),)


def _itself(*_: Any) -> Callable[[Any], Any]:
    return lambda result: result


def _parts(result: Any) -> _Parts:
    kind = type(result).__name__
    if isinstance(result, Mapping):
        names = [str(key) for key in result]
        return _Parts(operator.itemgetter, list(result), names, f"{kind} with {shown(names)}")
    if dataclasses.is_dataclass(result):
        names = [one.name for one in dataclasses.fields(result)]
        return _Parts(operator.attrgetter, names, names, f"{kind} with {shown(names)}")
    if isinstance(result, tuple | list):
        names = list(getattr(result, "_fields", ()))
        return _Parts(operator.itemgetter, range(len(result)), names, f"{kind} of {len(result)}")
    return _Parts(_itself, (0,), (), f"one {kind}")


def _valid(positional: Sequence[Argument], arguments: Sequence[Argument]) -> str:
    names = [one.name for one in arguments if one.passing in _NAMED]
    return shown(names + [f"INPUT__{index}" for index in range(len(positional))])


def _signature(arguments: Sequence[Argument]) -> str:
    """forward() as its author wrote it."""
    texts = [one.text for one in arguments]
    kinds = [one.passing for one in arguments]
    if Passing.KEYWORD in kinds and Passing.REST not in kinds:
        texts.insert(kinds.index(Passing.KEYWORD), "*")
    return f"forward({', '.join(texts)})"
