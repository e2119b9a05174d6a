"""The items of requests that Triton traces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch_py_backend.batching.gather_scatter import Item, Value

_NO_CONTEXT = contextlib.nullcontext()


class TracedItem(dict[str, Value]):
    """The item of a traced request.

    Attributes:
        context: returns a context manager in which the request's trace context is current.
    """

    __slots__ = ("context",)

    def __init__(
        self, item: Mapping[str, Value], context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        super().__init__(item)
        self.context = context

    def __or__(self, other: Mapping[str, Value]) -> TracedItem:  # type: ignore[override]
        """Return the item with other values, such as the state of a sequence."""
        return TracedItem({**self, **other}, self.context)


def entered(items: Sequence[Item]) -> AbstractContextManager[None]:
    """Return the trace context of the first item of a traced request; an empty one without any."""
    for item in items:
        if isinstance(item, TracedItem):
            return item.context()
    return _NO_CONTEXT


def like(item: Any, values: Item) -> Item:
    """Return other values with the trace context of an item, if it has one."""
    return TracedItem(values, item.context) if isinstance(item, TracedItem) else values
