"""Temporary wrappers around stages, such as a profiler's ranges.

A stage is an attribute of an object. Wrapping replaces the attribute, so that a batch pays nothing
while no wrapper is installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TypeAlias

# A stage: its name, the object that has it, and its attribute.
Stage: TypeAlias = "tuple[str, object, str]"
# Takes a stage's name and function; returns a wrapper, or the function itself to leave it as it is.
Around: TypeAlias = "Callable[[str, Callable[..., object]], Callable[..., object]]"


def wrap(stages: Iterable[Stage], around: Around) -> Callable[[], None]:
    """Wrap stages with `around`; the returned function removes the wrappers."""
    replaced = contextlib.ExitStack()
    for name, owner, attribute in stages:
        stage = getattr(owner, attribute)
        wrapper = around(name, stage)
        if wrapper is stage:
            continue
        # A method belongs to the class: deleting the instance's attribute restores it.
        if attribute in vars(owner):
            replaced.callback(setattr, owner, attribute, vars(owner)[attribute])
        else:
            replaced.callback(delattr, owner, attribute)
        setattr(owner, attribute, wrapper)
    return replaced.close
