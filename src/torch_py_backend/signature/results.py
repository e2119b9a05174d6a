"""Bind output names to the leaves of forward()'s result.

The name of an output is, in this order: a key or field of the result; a path, `RESULT`,
`RESULT[0]`, `RESULT[key][1]`; or `<name>__<number>`, the number of a leaf in the result's order. If
no name matches, outputs are bound in the config's order; as in Triton's LibTorch backend, also if
only some names are numbers and the result has no keys or fields.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch_py_backend.errors import BindingError, join_names
from torch_py_backend.signature.binding import Path, is_path, ordinal, path_text

log = logging.getLogger(__name__)

# A function from the result of forward() to the outputs, in the config's order.
OutputBinding: TypeAlias = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf of a result: its path, and the functions that lead to it."""

    path: Path
    labels: Path
    steps: tuple[Callable[[Any], Any], ...]

    def get(self, result: Any) -> Any:
        for step in self.steps:
            result = step(result)
        return result


def bind_outputs(
    model: str, names: Sequence[str], result: Any, of: str = "forward()"
) -> OutputBinding:
    """Bind output names to the leaves of results with the structure of a sample result.

    Args:
        model: the model's name.
        names: output names in the config's order.
        result: the result of forward() for a sample: a tensor or a list of strings, in any nesting
            of tuples, lists, mappings, dataclasses and named tuples.
        of: the function that returned it, for messages.

    Raises:
        BindingError: a name matches no leaf, or there are more names than leaves.
    """
    leaves = _leaves(result)
    aliases = _aliases(result, leaves)
    positions = [aliases.get(name, ordinal(name)) for name in names]
    indices = [index for index in positions if index is not None and index < len(leaves)]
    free = [name for name in names if not (is_path(name) or name in _names(result))]
    unknown = [index is None for index in positions]
    in_order = all(unknown) or (any(unknown) and not _names(result))
    if len(free) == len(names) <= len(leaves) and in_order:
        _warn_result_order(model, names, result, mixed=not all(unknown))
        indices = list(range(len(names)))
    if len(indices) < len(names) or len(set(indices)) < len(indices):
        valid = [*aliases, *(f"OUTPUT__{index}" for index in range(len(leaves)))]
        raise BindingError(
            model,
            f"the outputs {join_names(names)} do not fit what {of} returns, {_describe(result)}",
            expected=f"names among {join_names(valid)}",
        )
    return _selector([leaves[index] for index in indices], result)


def leaf_names(result: Any) -> list[str]:
    """Return a name for each leaf of a result: its key or field, else `OUTPUT__<number>`."""
    own = set(_names(result))
    return [
        str(leaf.labels[0])
        if len(leaf.labels) == 1 and str(leaf.labels[0]) in own
        else f"OUTPUT__{number}"
        for number, leaf in enumerate(_leaves(result))
    ]


def _leaves(value: Any) -> list[_Leaf]:
    """Return the leaves in the result's order; a list of strings is one leaf."""
    return list(_below(value, _Leaf((), (), ())))


def _below(value: Any, above: _Leaf) -> Iterator[_Leaf]:
    children = _children(value)
    if children is None:
        yield above
        return
    for child in children:
        path, labels = (*above.path, child.key), (*above.labels, child.label)
        yield from _below(child.value, _Leaf(path, labels, (*above.steps, child.step)))


class _Child(NamedTuple):
    """A part of a result: its key, its name (differs for named tuples), a getter and its value."""

    key: int | str
    label: int | str
    step: Callable[[Any], Any]
    value: Any


def _children(value: Any) -> list[_Child] | None:
    """Return the parts of a result; None for a leaf."""
    if isinstance(value, Mapping):
        keys: list[tuple[Any, int | str]] = [
            (key, key if isinstance(key, int) else str(key)) for key in value
        ]
        return [_Child(name, name, operator.itemgetter(key), value[key]) for key, name in keys]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [entry.name for entry in dataclasses.fields(value)]
        return [_Child(n, n, operator.attrgetter(n), getattr(value, n)) for n in names]
    if isinstance(value, tuple | list) and not _is_strings(value):
        labels: Sequence[int | str] = _fields(value) or range(len(value))
        return [
            _Child(index, label, _item(index), child)
            for index, (label, child) in enumerate(zip(labels, value, strict=True))
        ]
    return None


def _fields(value: Any) -> Sequence[str]:
    """Return the fields of a named tuple, or of a return type such as that of torch.max."""
    if not isinstance(value, tuple):
        return ()
    named: Sequence[str] = getattr(value, "_fields", getattr(value, "__match_args__", ()))
    return named


def _item(index: int) -> Callable[[Any], Any]:
    def take(value: Any) -> Any:
        if not isinstance(value, tuple | list):  # a tensor can be indexed, too
            raise TypeError(type(value).__name__)
        return value[index]

    return take


def _is_strings(value: Sequence[Any]) -> bool:
    """Return whether a sequence contains only strings, or (a list) nested lists of strings."""
    nested = isinstance(value, list)
    return bool(value) and all(
        isinstance(item, str | bytes) or (nested and isinstance(item, list) and _is_strings(item))
        for item in value
    )


def _names(result: Any) -> list[str]:
    """Return the keys or fields at the top level of a result; empty if it has none."""
    if isinstance(result, tuple | list):
        return list(_fields(result))
    return [str(child.key) for child in _children(result) or []]


def _aliases(result: Any, leaves: Sequence[_Leaf]) -> dict[str, int]:
    """Return the names of each leaf: keys and fields first, then paths."""
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
            join_names(_names(result)),
        )


def _selector(leaves: Sequence[_Leaf], result: Any) -> OutputBinding:
    if leaves[0].path == ():
        return lambda result: (result,)
    if isinstance(result, tuple | list):
        count = len(result)
        if [leaf.path for leaf in leaves] == [(index,) for index in range(count)]:
            return lambda result: _whole(result, count)
    return lambda result: [leaf.get(result) for leaf in leaves]


def _whole(result: Any, count: int) -> Sequence[Any]:
    """Return a result with one part per output, after a check of its structure."""
    if not isinstance(result, tuple | list) or len(result) != count:
        raise TypeError(type(result).__name__)
    return result


def _describe(result: Any) -> str:
    kind = type(result).__name__
    names = _names(result)
    if names:
        return f"{kind} with {join_names(names)}"
    if isinstance(result, tuple | list) and not _is_strings(result):
        return f"{kind} of {len(result)}"
    return f"one {kind}"
