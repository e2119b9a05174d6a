"""What stands around stages for a while, as a profiler's ranges do: put there, and taken away.

Stages are attributes of objects, and are replaced: nothing is asked on the way of a batch where
nothing stands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

# A stage: its name, the object that has it, and its attribute.
Stage: TypeAlias = "tuple[str, Any, str]"
# Given a stage's name and what does it, what does it instead; the same, where nothing shall.
Around: TypeAlias = "Callable[[str, Callable[..., Any]], Callable[..., Any]]"


def wrap(stages: Iterable[Stage], around: Around) -> Callable[[], None]:
    """Let something stand around stages, until what is returned is called."""
    replaced = contextlib.ExitStack()
    for name, owner, attribute in stages:
        stage = getattr(owner, attribute)
        made = around(name, stage)
        if made is not stage:
            replaced.callback(_replace(owner, attribute, made))
    return replaced.close


def _replace(owner: Any, attribute: str, made: Any) -> Callable[[], None]:
    """Set an attribute; what is returned makes it what it was."""
    own = vars(owner)
    # A method is the class's own, and is seen again once nothing hides it.
    before = own.get(attribute, own)
    setattr(owner, attribute, made)
    if before is own:
        return partial(delattr, owner, attribute)
    return partial(setattr, owner, attribute, before)
