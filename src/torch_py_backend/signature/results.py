"""Bind output names to the leaves of forward()'s result.

The name of an output is, in this order: a key or field of the result; a path, `RESULT`,
`RESULT[0]`, `RESULT[key][1]`; or `<name>__<number>`, the number of a leaf in the result's order.
If no name is a key, a field or a path, and not all are numbers, outputs of a tuple, a list or one
value are bound in the config's order.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch_py_backend.errors import BindingError, a_type, join_names
from torch_py_backend.signature.arguments import is_path, ordinal, path_text

log = logging.getLogger(__name__)

# Keys, indices and fields from the result down to a leaf.
Keys: TypeAlias = tuple[Any, ...]
# A function from the result of forward() to the outputs, in the config's order.
OutputBinding: TypeAlias = Callable[[object], Sequence[object]]


def bind_outputs(
    names: Sequence[str],
    result: object,
    of: str = "forward()",
) -> OutputBinding:
    """Bind output names to the leaves of results of the function `of`, as those of this result.

    It is a tensor or a list of strings, in any nesting of containers and dataclasses. BindingError
    if a name matches no leaf, or there are more names than leaves.
    """
    leaves = list(_leaves(result))
    aliases = {name: number for number, (name, _) in enumerate(leaves) if name}
    has_names = any((_parts(result) or {}).values())
    for number, (_, keys) in enumerate(leaves):
        aliases.setdefault(path_text("RESULT", keys), number)
    indices = [aliases.get(name, ordinal(name)) for name in names]
    has_order = isinstance(result, tuple) or not has_names
    is_none = aliases.keys().isdisjoint(names) and not any(map(is_path, names))
    # As LibTorch does it, also if some of the names have a number.
    if None in indices and is_none and has_order:
        if has_names or set(indices) != {None}:
            text = "the output names %s are no fields of the result; they are taken in its order."
            log.warning(text, ", ".join(names))
        indices = list(range(len(names)))
    selected = {i: leaves[i][1] for i in indices if i is not None and i < len(leaves)}
    if len(selected) < len(names):
        valid = [*aliases, *(f"OUTPUT__{number}" for number in range(len(leaves)))]
        raise BindingError(
            f"the outputs {join_names(names)} do not fit what {of} returns, {a_type(result)}",
            expected=f"names among {join_names(valid)}",
            cure="An output is a torch.Tensor or a list of strings, no list of numbers.",
        )
    paths = [*selected.values()]
    if paths == [()]:
        return lambda result: (result,)
    return lambda result: [_part(result, keys) for keys in paths]


def named_leaves(result: object) -> dict[str, object]:
    """Return the leaves of a result by their keys or fields, else by `OUTPUT__<number>`."""
    return {
        name or f"OUTPUT__{number}": _part(result, keys)
        for number, (name, keys) in enumerate(_leaves(result))
    }


def _leaves(
    value: object,
    name: str = "",
    path: Keys = (),
) -> Iterator[tuple[str, Keys]]:
    """Yield the name and the keys of each leaf in order; a list of strings is one leaf."""
    parts = _parts(value)
    if parts is None:
        yield name, path
        return
    for key, field in parts.items():
        yield from _leaves(_part(value, (key,)), "" if path else field, (*path, key))


def _parts(value: object) -> dict[Any, str] | None:
    """Return the names of a value's parts by what selects them, "" for none; None: it is a leaf."""
    if isinstance(value, Mapping):
        return {key: str(key) for key in value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: field.name for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list) and not _is_strings(value):
        # The fields of a named tuple, or of a return type such as that of torch.max.
        fields = getattr(value, "_fields", getattr(value, "__match_args__", ()))
        return dict(enumerate(fields or [""] * len(value)))
    return None


def _part(value: Any, path: Keys) -> object:
    """Return a leaf of a result that may have another structure than the sample."""
    for key in path:
        # A tensor can be indexed, too, but has no parts.
        has_items = isinstance(value, Mapping | tuple | list)
        value = value[key] if has_items else getattr(value, key)
    return value


def _is_strings(value: Sequence[object]) -> bool:
    """Return whether a sequence contains only strings, or (a list) nested lists of strings."""
    nested = isinstance(value, list)
    return bool(value) and all(
        isinstance(item, str | bytes) or (nested and isinstance(item, list) and _is_strings(item))
        for item in value
    )
