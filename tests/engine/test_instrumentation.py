"""What stands around stages: seen while it does, gone without a trace afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torch_py_backend.engine import instrumentation


class Owner:
    """A stage of the class's own, and one that is set when it is made."""

    def __init__(self) -> None:
        self.kept: Callable[[], str] = lambda: "kept"

    def own(self) -> str:
        return "own"


def around(*names: str) -> instrumentation.Around:
    """Brackets around what these stages return."""

    def bracket(name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        return (lambda: f"[{stage()}]") if name in names else stage

    return bracket


@pytest.mark.parametrize("attribute", ["own", "kept"])
def test_a_stage_is_what_it_was(attribute: str) -> None:
    """Between the two calls the stage is replaced; before and after it is the object's own."""
    owner = Owner()
    before, stage = dict(vars(owner)), getattr(owner, attribute)

    take_away = instrumentation.wrap([("stage", owner, attribute)], around("stage"))
    during = getattr(owner, attribute)()
    take_away()

    assert during == f"[{attribute}]"
    assert getattr(owner, attribute) == stage
    assert vars(owner) == before


def test_what_nothing_stands_around_is_left_alone() -> None:
    """A stage that is given back as it came costs nothing: it is not even set."""
    owner = Owner()
    before = dict(vars(owner))

    instrumentation.wrap([("stage", owner, "own"), ("other", owner, "kept")], around())

    assert vars(owner) == before


def test_one_around_the_other() -> None:
    """Who comes later stands outside, and leaves what was there before."""
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
