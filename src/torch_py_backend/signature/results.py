"""Output names tied to the leaves of forward()'s result.

An output's name is, in this order: a key or field of the result; a path, `RESULT`, `RESULT[0]`,
`RESULT[key][1]`; or `<name>__<number>`, the number of a leaf in the result's own order. Where no
name fits, the config's order decides; for a result without keys or fields also where only some of
the names are numbers, as in Triton's LibTorch backend.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch_py_backend.errors import BindingError, shown
from torch_py_backend.signature.binding import Path, is_path, ordinal, path_text

log = logging.getLogger(__name__)

# Takes forward()'s result and gives the configured outputs, in the config's order.
Outputs: TypeAlias = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One part of a result: where it stands, and how it is reached step by step."""

    path: Path
    labels: Path
    steps: tuple[Callable[[Any], Any], ...]

    def get(self, result: Any) -> Any:
        for step in self.steps:
            result = step(result)
        return result


def bind_outputs(model: str, names: Sequence[str], result: Any, of: str = "forward()") -> Outputs:
    """Tie the config's output names to the leaves of a result like this one.

    Args:
        model: the model's name.
        names: output names in the config's order.
        result: what forward() returned for a sample: a tensor or a list of strings, in any nesting
            of tuples, lists, mappings, dataclasses and named tuples.
        of: what returned it, for messages.

    Raises:
        BindingError: a name that the result does not have, or more names than it has leaves.
    """
    leaves = _leaves(result)
    aliases = _aliases(result, leaves)
    positions = [aliases.get(name, ordinal(name)) for name in names]
    found = [index for index in positions if index is not None and index < len(leaves)]
    free = [name for name in names if not (is_path(name) or name in _names(result))]
    unfit = [index is None for index in positions]
    in_order = all(unfit) or (any(unfit) and not _names(result))
    if len(free) == len(names) <= len(leaves) and in_order:
        _warn_result_order(model, names, result, mixed=not all(unfit))
        found = list(range(len(names)))
    if len(found) < len(names) or len(set(found)) < len(found):
        valid = [*aliases, *(f"OUTPUT__{index}" for index in range(len(leaves)))]
        raise BindingError(
            model,
            f"the outputs {shown(names)} do not fit what {of} returns, {_describe(result)}",
            expected=f"names among {shown(valid)}",
        )
    return _selector([leaves[index] for index in found], result)


def names(result: Any) -> list[str]:
    """A name for every leaf of a result: its key or field, else `OUTPUT__<number>`."""
    own = set(_names(result))
    return [
        str(leaf.labels[0])
        if len(leaf.labels) == 1 and str(leaf.labels[0]) in own
        else f"OUTPUT__{number}"
        for number, leaf in enumerate(_leaves(result))
    ]


def _leaves(value: Any) -> list[_Leaf]:
    """The leaves in the result's own order; a list of strings is one leaf."""
    return list(_below(value, _Leaf((), (), ())))


def _below(value: Any, above: _Leaf) -> Iterator[_Leaf]:
    children = _children(value)
    if children is None:
        yield above
        return
    for one in children:
        path, labels = (*above.path, one.key), (*above.labels, one.label)
        yield from _below(one.value, _Leaf(path, labels, (*above.steps, one.step)))


class _Child(NamedTuple):
    """A part of a result: its key and its name (the same but for named tuples), how to take it."""

    key: int | str
    label: int | str
    step: Callable[[Any], Any]
    value: Any


def _children(value: Any) -> list[_Child] | None:
    """The parts of a result; None for what has none."""
    if isinstance(value, Mapping):
        keys: list[tuple[Any, int | str]] = [
            (key, key if isinstance(key, int) else str(key)) for key in value
        ]
        return [_Child(name, name, operator.itemgetter(key), value[key]) for key, name in keys]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in dataclasses.fields(value)]
        return [_Child(n, n, operator.attrgetter(n), getattr(value, n)) for n in names]
    if isinstance(value, tuple | list) and not _is_strings(value):
        labels: Sequence[int | str] = _fields(value) or range(len(value))
        return [
            _Child(index, label, _item(index), child)
            for index, (label, child) in enumerate(zip(labels, value, strict=True))
        ]
    return None


def _fields(value: Any) -> Sequence[str]:
    """The fields of a named tuple, and of what torch.max and its kind return."""
    if not isinstance(value, tuple):
        return ()
    named: Sequence[str] = getattr(value, "_fields", getattr(value, "__match_args__", ()))
    return named


def _item(index: int) -> Callable[[Any], Any]:
    def take(value: Any) -> Any:
        if not isinstance(value, tuple | list):  # a tensor has items, too
            raise TypeError(type(value).__name__)
        return value[index]

    return take


def _is_strings(value: Sequence[Any]) -> bool:
    """Strings, or lists of them in a list; lists in a tuple are parts of their own."""
    nested = isinstance(value, list)
    return bool(value) and all(
        isinstance(one, str | bytes) or (nested and isinstance(one, list) and _is_strings(one))
        for one in value
    )


def _names(result: Any) -> list[str]:
    """The names of a result's own parts; empty where they have none."""
    if isinstance(result, tuple | list):
        return list(_fields(result))
    return [str(one.key) for one in _children(result) or []]


def _aliases(result: Any, leaves: Sequence[_Leaf]) -> dict[str, int]:
    """Every name that leads to a leaf: keys and fields first, then paths."""
    aliases: dict[str, int] = {}
    own = set(_names(result))
    for index, leaf in enumerate(leaves):
        if len(leaf.labels) == 1 and str(leaf.labels[0]) in own:
            aliases[str(leaf.labels[0])] = index
    for index, leaf in enumerate(leaves):
        aliases.setdefault(path_text("RESULT", leaf.path), index)
    for index, leaf in enumerate(leaves):
        aliases.setdefault(path_text("RESULT", leaf.labels), index)
    return aliases


def _warn_result_order(model: str, names: Sequence[str], result: Any, *, mixed: bool) -> None:
    if mixed:
        log.warning(
            "model '%s': the output names %s are not all numbers (OUTPUT__0, OUTPUT__1, …); they"
            " are taken in the result's order.",
            model,
            ", ".join(names),
        )
    elif _names(result):
        log.warning(
            "model '%s': the output names %s are not among the result's %s; they are taken in the"
            " result's order.",
            model,
            ", ".join(names),
            shown(_names(result)),
        )


def _selector(leaves: Sequence[_Leaf], result: Any) -> Outputs:
    if leaves[0].path == ():
        return lambda result: (result,)
    if isinstance(result, tuple | list):
        count = len(result)
        if [leaf.path for leaf in leaves] == [(index,) for index in range(count)]:
            return lambda result: _whole(result, count)
    return lambda result: [leaf.get(result) for leaf in leaves]


def _whole(result: Any, count: int) -> Sequence[Any]:
    """A tuple of which every part is an output, in its order."""
    if not isinstance(result, tuple | list) or len(result) != count:
        raise TypeError(type(result).__name__)
    return result


def _describe(result: Any) -> str:
    kind = type(result).__name__
    names = _names(result)
    if names:
        return f"{kind} with {shown(names)}"
    if isinstance(result, tuple | list) and not _is_strings(result):
        return f"{kind} of {len(result)}"
    return f"one {kind}"
