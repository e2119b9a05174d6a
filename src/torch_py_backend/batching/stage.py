"""A function on the path of a batch, around which a profiler or a tracer can put itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# Takes a stage's name and function; returns a wrapper, or the function itself to leave it as it is.
Around: TypeAlias = "Callable[[str, Callable[..., Any]], Callable[..., Any]]"


class Stage(Generic[F]):
    """One stage.

    Attributes:
        name: the name in traces.
        call: the function within the wrappers of `around`. Without any, it is the function itself,
            and a batch pays nothing.
    """

    __slots__ = ("_around", "_function", "call", "name")

    def __init__(self, name: str, function: F) -> None:
        self.name = name
        self._around: tuple[Around, ...] = ()
        self.replace(function)

    def replace(self, function: F) -> None:
        """Replace the function, but not what is around it."""
        self._function = function
        call: Callable[..., Any] = function
        for around in self._around:
            call = around(self.name, call)
        self.call = cast("F", call)

    def add(self, around: Around) -> None:
        """Put `around` around the function, as the outermost."""
        self._around = (*self._around, around)
        self.replace(self._function)

    def remove(self, around: Around) -> None:
        """Remove what `add` has added."""
        self._around = tuple(other for other in self._around if other is not around)
        self.replace(self._function)
