"""Bind output names to the leaves of forward()'s result.

The name of an output is, in this order: a key or field of the result; a path, `RESULT`,
`RESULT[0]`, `RESULT[key][1]`; or `<name>__<number>`, the number of a leaf in the result's order.
Outputs of a result without keys and fields are bound in the config's order if no name matches; as
in Triton's LibTorch backend, also if only some names are numbers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch_py_backend.errors import BindingError, a_type, join_names
from torch_py_backend.signature.arguments import is_path, ordinal, path_text

log = logging.getLogger(__name__)

# A function from the result of forward() to the outputs, in the config's order.
OutputBinding: TypeAlias = Callable[[object], Sequence[object]]
# Keys, indices and fields from the result down to a leaf.
Keys: TypeAlias = tuple[Any, ...]


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
    fields = [name for name in (_parts(result) or {}).values() if name]
    aliases = {name: index for index, name in enumerate(leaf_names(result)) if name in fields}
    for index, keys in enumerate(leaves):
        aliases.setdefault(path_text("RESULT", keys), index)
    indices = [aliases.get(name, ordinal(name)) for name in names]
    unknown = indices.count(None)
    in_order = unknown > 0
    if fields:
        in_order = fields_optional and isinstance(result, tuple) and unknown == len(names)
    if in_order and not any(is_path(name) or name in fields for name in names):
        if fields or unknown < len(names):
            log.warning(
                "the output names %s are neither all numbers (OUTPUT__0, OUTPUT__1, …) nor fields"
                " of the result; they are taken in the result's order.",
                ", ".join(names),
            )
        indices = list(range(len(names)))
    bound = {index: leaves[index] for index in indices if index is not None and index < len(leaves)}
    if len(bound) < len(names):
        valid = [*aliases, *(f"OUTPUT__{index}" for index in range(len(leaves)))]
        raise BindingError(
            f"the outputs {join_names(names)} do not fit what {of} returns, {a_type(result)}",
            expected=f"names among {join_names(valid)}",
            cure="An output is a torch.Tensor or a list of strings, no list of numbers.",
        )
    selected = list(bound.values())
    if selected == [()]:
        return lambda result: (result,)
    if isinstance(result, tuple | list):
        count = len(result)
        if selected == [(index,) for index in range(count)]:
            return partial(_whole, count)
    if isinstance(result, Mapping) and all(len(keys) == 1 for keys in selected):
        return partial(_values, tuple(key for (key,) in selected))
    return lambda result: [_part(result, keys) for keys in selected]


def _whole(count: int, result: object) -> Sequence[object]:
    """Return a result whose items are the outputs."""
    if not isinstance(result, tuple | list) or len(result) != count:
        raise TypeError(type(result).__name__)
    return result


def _values(keys: Keys, result: Mapping[Any, object]) -> Sequence[object]:
    return [result[key] for key in keys]


def leaf_names(result: object) -> list[str]:
    """Return a name for each leaf of a result: its key or field, else `OUTPUT__<number>`."""
    fields = {(key,): name for key, name in (_parts(result) or {}).items() if name}
    return [fields.get(keys, f"OUTPUT__{number}") for number, keys in enumerate(_leaves(result))]


def _leaves(value: object, path: Keys = ()) -> Iterator[Keys]:
    """Yield the keys of each leaf in the result's order; a list of strings is one leaf."""
    parts = _parts(value)
    if parts is None:
        yield path
        return
    for key in parts:
        yield from _leaves(_part(value, (key,)), (*path, key))


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
