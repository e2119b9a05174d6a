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

    def own(self) -> str:
        return "own"


def around(*names: str) -> instrumentation.Around:
    """Return wrappers that put brackets around the results of these stages."""

    def bracket(name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        return (lambda: f"[{stage()}]") if name in names else stage

    return bracket


@pytest.mark.parametrize("attribute", ["own", "kept"])
def test_removal_restores_the_stage(attribute: str) -> None:
    """The stage is replaced while the wrapper is installed, and restored afterwards."""
    owner = Owner()
    before, stage = dict(vars(owner)), getattr(owner, attribute)

    take_away = instrumentation.wrap([("stage", owner, attribute)], around("stage"))
    during = getattr(owner, attribute)()
    take_away()

    assert during == f"[{attribute}]"
    assert getattr(owner, attribute) == stage
    assert vars(owner) == before


def test_nested_wrappers() -> None:
    """A later wrapper is the outer one, and removing it leaves the inner one."""
    owner = Owner()
    stages = [("stage", owner, "own")]

    first = instrumentation.wrap(stages, around("stage"))
    second = instrumentation.wrap(stages, around("stage"))
    found = [owner.own()]
    second()
    found.append(owner.own())
    first()

    assert found == ["[[own]]", "[own]"]
    assert owner.own() == "own"
