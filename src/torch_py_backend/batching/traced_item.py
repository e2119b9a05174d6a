"""The items of requests that Triton traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

from torch_py_backend.batching.gather_scatter import Item, Value

# Returns a context manager in which the trace context of a request is current; None: the request is
# not traced.
EnterContext: TypeAlias = "Callable[[], AbstractContextManager[None]] | None"


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


def contexts(items: Sequence[Item]) -> Sequence[EnterContext]:
    """Return the context of each item; empty if none of their requests is traced."""
    entered = [getattr(item, "context", None) for item in items]
    return entered if any(entered) else ()
