"""Wrappers around stages: active until removed, and then gone without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torch_py_backend.engine import instrumentation


class Owner:
    """An object with a stage as a method and one as an attribute."""

    def __init__(self) -> None:
        self.kept: Callable[[], str] = lambda: "kept"
        self.unused = self.kept

    def own(self) -> str:
        return "own"


def around(*names: str) -> instrumentation.Around:
    """Return wrappers that put brackets around the results of these stages."""

    def bracket(name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        return (lambda: f"[{stage()}]") if name in names else stage

    return bracket


@pytest.mark.parametrize("attribute", ["own", "kept"])
def test_wrappers(attribute: str) -> None:
    """A later wrapper is the outer one; each is removed without a trace."""
    owner = Owner()
    before, stage = dict(vars(owner)), getattr(owner, attribute)
    stages = [("stage", owner, attribute), ("other", owner, "unused")]
    remove_inner = instrumentation.wrap(stages, around("stage"))
    remove_outer = instrumentation.wrap(stages, around("stage"))
    results = [getattr(owner, attribute)()]
    remove_outer()
    results.append(getattr(owner, attribute)())
    remove_inner()
    assert results == [f"[[{attribute}]]", f"[{attribute}]"]
    assert getattr(owner, attribute) == stage
    assert vars(owner) == before
