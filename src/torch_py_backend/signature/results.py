"""Bind output names to the leaves of forward()'s result.

The name of an output is, in this order: a key or field of the result; a path, `RESULT`,
`RESULT[0]`, `RESULT[key][1]`; or `<name>__<number>`, the number of a leaf in the result's order.
Outputs of a result without keys and fields are bound in the config's order if no name matches; as
in Triton's LibTorch backend, also if only some names are numbers.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch_py_backend.errors import BindingError, join_names
from torch_py_backend.signature.arguments import Path, is_path, ordinal, path_text

log = logging.getLogger(__name__)

# A function from the result of forward() to the outputs, in the config's order.
OutputBinding: TypeAlias = Callable[[object], Sequence[object]]
Getter: TypeAlias = Callable[[Any], object]


class _Leaf(NamedTuple):
    """A leaf of a result: its path, the same with the fields of named tuples, and how to get it."""

    path: Path
    labels: Path
    get: Getter


def bind_outputs(
    names: Sequence[str],
    result: object,
    of: str = "forward()",
    *,
    fields_optional: bool = False,
) -> OutputBinding:
    """Bind output names to the leaves of results with the structure of a sample result.

    Args:
        names: output names in the config's order.
        result: the result of forward() for a sample: a tensor or a list of strings, in any nesting
            of tuples, lists, mappings, dataclasses and named tuples.
        of: the function that returned it, for messages.
        fields_optional: bind the fields of a named tuple in the config's order if no name matches,
            as Triton's own backends do, which know no fields.

    Raises:
        BindingError: a name matches no leaf, or there are more names than leaves.
    """
    leaves = list(_leaves(result))
    fields = _names(result)
    # Keys and fields come before paths.
    keys = [_field_name(leaf, fields) for leaf in leaves]
    aliases = {key: index for index, key in enumerate(keys) if key is not None}
    for paths in ([leaf.path for leaf in leaves], [leaf.labels for leaf in leaves]):
        for index, path in enumerate(paths):
            aliases.setdefault(path_text("RESULT", path), index)
    positions = [aliases.get(name, ordinal(name)) for name in names]
    indices = [index for index in positions if index is not None and index < len(leaves)]
    unknown = [index is None for index in positions]
    unmatched = not any(is_path(name) or name in fields for name in names)
    if fields:
        in_order = fields_optional and isinstance(result, tuple) and all(unknown)
    else:
        in_order = any(unknown)
    if in_order and unmatched and len(names) <= len(leaves):
        if fields or not all(unknown):
            log.warning(
                "the output names %s %s; they are taken in the result's order.",
                ", ".join(names),
                f"are not among the result's {join_names(fields)}"
                if fields
                else "are not all numbers (OUTPUT__0, OUTPUT__1, …)",
            )
        indices = list(range(len(names)))
    if len(indices) < len(names) or len(set(indices)) < len(indices):
        valid = [*aliases, *(f"OUTPUT__{index}" for index in range(len(leaves)))]
        misspelt = [name for name in names if name not in aliases]
        meant = [key for name in misspelt for key in difflib.get_close_matches(name, fields, n=1)]
        cure = f"Did you mean {join_names(meant)}?" if meant else ""
        if set(misspelt) & set(fields):  # a list or a dict is there
            cure = f"Return a torch.Tensor as {join_names(misspelt)}, or name its parts."
        raise BindingError(
            f"the outputs {join_names(names)} do not fit what {of} returns, {_describe(result)}",
            expected=f"names among {join_names(valid)}",
            cure=cure,
        )
    return _selector([leaves[index] for index in indices], result)


def leaf_names(result: object) -> list[str]:
    """Return a name for each leaf of a result: its key or field, else `OUTPUT__<number>`."""
    fields = _names(result)
    return [
        _field_name(leaf, fields) or f"OUTPUT__{number}"
        for number, leaf in enumerate(_leaves(result))
    ]


def _leaves(
    value: object, path: Path = (), labels: Path = (), get: Getter = lambda result: result
) -> Iterator[_Leaf]:
    """Yield the leaves in the result's order; a list of strings is one leaf."""
    children = _children(value)
    if children is None:
        yield _Leaf(path, labels, get)
        return
    for key, label, step in children:
        way = step if not path else _then(get, step)
        yield from _leaves(step(value), (*path, key), (*labels, label), way)


def _then(get: Getter, step: Getter) -> Getter:
    return lambda result: step(get(result))


def _children(value: object) -> list[tuple[int | str, int | str, Getter]] | None:
    """Return key, label (of a named tuple: its field) and getter of each part; None: a leaf."""
    if isinstance(value, Mapping):
        names = [key if isinstance(key, int) else str(key) for key in value]
        return list(zip(names, names, map(operator.itemgetter, value), strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return [(name, name, operator.attrgetter(name)) for name in fields]
    if isinstance(value, tuple | list) and not _is_strings(value):
        labels: Sequence[int | str] = _fields(value) or range(len(value))
        return [(index, label, _item(index)) for index, label in enumerate(labels)]
    return None


def _fields(value: Sequence[object]) -> Sequence[str]:
    """Return the fields of a named tuple, or of a return type such as that of torch.max."""
    if not isinstance(value, tuple):
        return ()
    named: Sequence[str] = getattr(value, "_fields", getattr(value, "__match_args__", ()))
    return named


def _item(index: int) -> Getter:
    def get(value: object) -> object:
        if not isinstance(value, tuple | list):  # a tensor can be indexed, too
            raise TypeError(type(value).__name__)
        return value[index]

    return get


def _is_strings(value: Sequence[object]) -> bool:
    """Return whether a sequence contains only strings, or (a list) nested lists of strings."""
    nested = isinstance(value, list)
    return bool(value) and all(
        isinstance(item, str | bytes) or (nested and isinstance(item, list) and _is_strings(item))
        for item in value
    )


def _names(result: object) -> list[str]:
    """Return the keys or fields at the top level of a result; empty if it has none."""
    if isinstance(result, tuple | list):
        return list(_fields(result))
    return [str(key) for key, _, _ in _children(result) or ()]


def _field_name(leaf: _Leaf, fields: Sequence[str]) -> str | None:
    """Return the key or field of a leaf at the top level."""
    name = str(leaf.labels[0]) if len(leaf.labels) == 1 else ""
    return name if name in fields else None


def _selector(leaves: Sequence[_Leaf], result: object) -> OutputBinding:
    if isinstance(result, tuple | list):
        count = len(result)

        def checked(result: object) -> Sequence[object]:
            if not isinstance(result, tuple | list) or len(result) != count:
                raise TypeError(type(result).__name__)
            return result

        if [leaf.path for leaf in leaves] == [(index,) for index in range(count)]:
            return checked
    getters = [leaf.get for leaf in leaves]
    return lambda result: [get(result) for get in getters]


def _describe(result: object) -> str:
    kind = type(result).__name__
    names = _names(result)
    if names:
        return f"{kind} with {join_names(names)}"
    if isinstance(result, tuple | list) and not _is_strings(result):
        return f"{kind} of {len(result)}"
    return f"one {kind}"
