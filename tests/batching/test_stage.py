"""Functions around a stage: active until removed, and then gone without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_py_backend.batching.stage import Around, Stage


def bracket(sign: str) -> Around:
    """Return a wrapper that puts a sign before the results of the stage 'seen'."""

    def around(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return (lambda: sign + function()) if name == "seen" else function

    return around


def test_around() -> None:
    """A later wrapper is the outer one; each is removed without the other, in any order."""

    def function() -> str:
        return "result"

    first, second = bracket("1"), bracket("2")
    stage, other = Stage("seen", function), Stage("unseen", function)
    for one in (stage, other):
        one.add(first)
        one.add(second)
    results = [stage.call()]
    stage.remove(first)
    results.append(stage.call())
    stage.replace(lambda: "new")
    results.append(stage.call())
    stage.remove(second)
    assert results == ["21result", "2result", "2new"]
    assert stage.call() == "new"
    assert other.call is function
    stage.replace(function)
    assert stage.call is function
