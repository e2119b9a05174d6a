"""Loads and unloads in threads of their own: what they do, and what they tell at their end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from torch_py_backend.errors import ServerError
from torch_py_backend.server.pending_operations import Operation, PendingOperations
from torch_py_backend.server.tritonserver import ModelState


class Triton:
    """Models by name, READY or not; an ensemble goes with its part."""

    def __init__(self, *ready: str) -> None:
        self.ready = dict.fromkeys(ready, True)
        self.parts = {"ensemble": "part"}
        self.calls: list[str] = []
        self.fails: Exception | None = None

    def states(self) -> Sequence[ModelState]:
        return [
            ModelState(name, "1", there, "" if there else "unloaded", unloaded=not there)
            for name, there in self.ready.items()
        ]

    def load(self, model: str, seconds: float) -> None:
        self.calls.append(f"load {model} {seconds:g}")
        if self.fails is not None:
            raise self.fails
        self.ready[model] = True

    def unload(self, model: str) -> None:
        self.calls.append(f"unload {model}")
        if self.fails is not None:
            raise self.fails
        self.ready |= {name: False for name in (model, *self.ready) if self._needs(name, model)}

    def _needs(self, name: str, model: str) -> bool:
        return name == model or self.parts.get(name) == model


def _does(triton: Triton, what: Callable[[PendingOperations], Operation]) -> Operation:
    """An operation, once it has ended."""
    over = threading.Event()
    operations = PendingOperations(
        triton.states,
        triton,
        lambda operation: threading.Thread(target=operation).start(),
        over.set,
    )
    started = what(operations)
    assert over.wait(60)
    assert operations.completed() == [started]
    assert operations.completed() == []
    return started


@pytest.mark.parametrize(
    ("ready", "again", "calls"),
    [
        ((), False, ["load part 9"]),
        (("part",), False, ["load part 9"]),
        (("part",), True, ["unload part", "load part 9"]),
        ((), True, ["load part 9"]),
    ],
    ids=["first", "somebody was quicker", "all dead, and READY", "again"],
)
def test_loads(ready: Sequence[str], again: bool, calls: Sequence[str]) -> None:
    """What Triton still calls READY is unloaded before it is loaded again."""
    triton = Triton(*ready)
    operation = _does(triton, lambda operations: operations.load("part", 1.0, 9.0, (), again=again))
    assert triton.calls == calls
    assert (operation.is_load, operation.error, operation.started) == (True, None, 1.0)


def test_ensembles_are_told_and_come_back() -> None:
    """An unload tells which ensembles went along; a load brings them back where Triton does not."""
    triton = Triton("part", "ensemble", "other")
    gone = _does(triton, lambda operations: operations.unload("part", 1.0))
    assert gone.dependents == {"ensemble"}
    _does(
        triton,
        lambda operations: operations.load("part", 2.0, 9.0, sorted(gone.dependents), again=True),
    )
    assert triton.calls == ["unload part", "load part 9", "load ensemble 9"]


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (ServerError("no"), "no"),
        (OSError("gone"), ""),
        (KeyError("ensemble"), ""),
        (TypeError("what is this?"), "TypeError: what is this?"),
    ],
    ids=["refused", "the server ends", "the ensemble is gone", "what nobody expects"],
)
def test_failures(raised: Exception, message: str) -> None:
    """Each end is message; that a server or an ensemble has gone is nothing to act on."""
    triton = Triton()
    triton.fails = raised
    operation = _does(triton, lambda operations: operations.load("part", 1.0, 9.0, (), again=False))
    assert str(operation.error or "") == message
