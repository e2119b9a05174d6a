"""A request's parameters: read from Triton's JSON, and carried with an item to who asks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

# What a client may put beside its tensors.
Parameters: TypeAlias = "Mapping[str, str | int | float | bool]"

# The argument by which a hook asks for them.
ASKED = "parameters"
# Their place in an item: no tensor has this name, for Triton demands one.
KEY = ""
_NONE: Parameters = MappingProxyType({})


class Held:
    """A value that numpy shall not look into."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def parse(text: str) -> Parameters:
    """The parameters that Triton has written as JSON; it writes an empty text for none."""
    return json.loads(text) if text else _NONE


def column(values: Iterable[Any]) -> np.ndarray[Any, np.dtype[np.object_]]:
    """Values of any kind as a column of a batch, one a row."""
    held = [Held(value) for value in values]
    made = np.empty(len(held), dtype=np.object_)
    for place, one in enumerate(held):
        made[place] = one
    return made


def values(held: Iterable[Any]) -> list[Any]:
    """What was put into a column."""
    return [one.value for one in held]


def taken(item: dict[str, Any]) -> Parameters:
    """The parameters that an item carries, which it does not carry any more."""
    held = item.pop(KEY, None)
    found: Parameters = _NONE if held is None else held[0].value
    return found
