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
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch_py_backend.errors import BindingError, join_names
from torch_py_backend.signature.arguments import is_path, ordinal

log = logging.getLogger(__name__)

# A function from the result of forward() to the outputs, in the config's order.
OutputBinding: TypeAlias = Callable[[object], Sequence[object]]
Getter: TypeAlias = Callable[[Any], Any]


class _Leaf(NamedTuple):
    """A leaf of a result: its path, its key or field at the top level, and how to get it."""

    path: str
    name: str | None
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
    fields = [name for _, name, _ in _parts(result) or () if name is not None]
    aliases = {leaf.name: index for index, leaf in enumerate(leaves) if leaf.name is not None}
    for index, leaf in enumerate(leaves):
        aliases.setdefault(leaf.path, index)
    indices = [aliases.get(name, ordinal(name)) for name in names]
    unknown = indices.count(None)
    if fields:
        problem = f"are not among the result's {join_names(fields)}"
        in_order = fields_optional and isinstance(result, tuple) and unknown == len(names)
    else:
        problem = "are not all numbers (OUTPUT__0, OUTPUT__1, …)"
        in_order = unknown > 0
    named = any(is_path(name) or name in fields for name in names)
    if in_order and not named and len(names) <= len(leaves):
        if fields or unknown < len(names):
            warning = "the output names %s %s; they are taken in the result's order."
            log.warning(warning, ", ".join(names), problem)
        indices = list(range(len(names)))
    bound = {index: leaves[index] for index in indices if index is not None and index < len(leaves)}
    if len(bound) < len(names):
        valid = [*aliases, *(f"OUTPUT__{index}" for index in range(len(leaves)))]
        raise BindingError(
            f"the outputs {join_names(names)} do not fit what {of} returns,"
            f" {_describe(result, fields)}",
            expected=f"names among {join_names(valid)}",
            cure=_cure([name for name in names if name not in aliases], fields),
        )
    count, paths = len(bound), [leaf.path for leaf in bound.values()]
    if paths == ["RESULT"]:
        return lambda result: (result,)
    items = [f"RESULT[{index}]" for index in range(count)]
    if isinstance(result, tuple | list) and len(result) == count and paths == items:
        return partial(_whole, count)
    getters = [leaf.get for leaf in bound.values()]
    return lambda result: [get(result) for get in getters]


def _whole(count: int, result: object) -> Sequence[object]:
    """Return a result whose items are the outputs."""
    if not isinstance(result, tuple | list) or len(result) != count:
        raise TypeError(type(result).__name__)
    return result


def leaf_names(result: object) -> list[str]:
    """Return a name for each leaf of a result: its key or field, else `OUTPUT__<number>`."""
    return [leaf.name or f"OUTPUT__{number}" for number, leaf in enumerate(_leaves(result))]


def _leaves(
    value: object,
    path: str = "RESULT",
    name: str | None = None,
    get: Getter = lambda result: result,
) -> Iterator[_Leaf]:
    """Yield the leaves in the result's order; a list of strings is one leaf."""
    parts = _parts(value)
    if parts is None:
        yield _Leaf(path, name, get)
        return
    for key, label, step in parts:
        if path == "RESULT":
            yield from _leaves(step(value), f"{path}[{key}]", label, step)
        else:
            yield from _leaves(step(value), f"{path}[{key}]", None, _then(get, step))


def _then(get: Getter, step: Getter) -> Getter:
    return lambda result: step(get(result))


def _parts(value: object) -> list[tuple[object, str | None, Getter]] | None:
    """Return index or key, name if it has one, and getter of each part; None: a leaf."""
    if isinstance(value, Mapping):
        return [(key, str(key), operator.itemgetter(key)) for key in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, name, operator.attrgetter(name)) for name in names]
    if not isinstance(value, tuple | list) or _is_strings(value):
        return None
    # The fields of a named tuple, or of a return type such as that of torch.max.
    fields = getattr(value, "_fields", getattr(value, "__match_args__", ()))
    return [(i, name, _item(i)) for i, name in enumerate(fields or [None] * len(value))]


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


def _cure(misspelt: Sequence[str], fields: Sequence[str]) -> str:
    containers = [name for name in misspelt if name in fields]  # a list or a dict is there
    if containers:
        return f"Return a torch.Tensor as {join_names(containers)}, or name its parts."
    meant = [key for name in misspelt for key in difflib.get_close_matches(name, fields, n=1)]
    return f"Did you mean {join_names(meant)}?" if meant else ""


def _describe(result: object, fields: Sequence[str]) -> str:
    kind = type(result).__name__
    if fields:
        return f"{kind} with {join_names(fields)}"
    if isinstance(result, tuple | list) and not _is_strings(result):
        return f"{kind} of {len(result)}"
    return f"one {kind}"
