"""The parameters of a request: parsed from Triton's JSON, and passed to hooks in a column."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

# Values that a client sends in addition to its tensors.
Parameters: TypeAlias = "Mapping[str, str | int | float | bool]"

# The name of the argument through which a hook receives them.
ARGUMENT = "parameters"
# Their key in an item. No tensor has it: Triton requires a name.
KEY = ""
_NONE: Parameters = MappingProxyType({})


class Opaque:
    """A wrapper that keeps numpy from converting a value."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def parse(text: str) -> Parameters:
    """Parse Triton's JSON of the parameters, which is empty if there are none."""
    return json.loads(text) if text else _NONE


def column(values: Iterable[object]) -> np.ndarray[Any, np.dtype[np.object_]]:
    """Return a column of a batch with one value of any type per row."""
    rows = [Opaque(value) for value in values]
    array = np.empty(len(rows), dtype=np.object_)
    array[:] = rows
    return array


def values(rows: Iterable[Opaque]) -> list[Any]:
    """Return the values of a column."""
    return [row.value for row in rows]


def pop(item: dict[str, Any]) -> Parameters:
    """Remove the parameters from an item and return them."""
    rows = item.pop(KEY, None)
    parameters: Parameters = _NONE if rows is None else rows[0].value
    return parameters
