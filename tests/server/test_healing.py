"""When a model is loaded again: a table of histories, without clocks or processes."""

from __future__ import annotations

from typing import Any

import pytest

from torch_py_backend.server.healing import Lifecycle, Phase, delay


def _after(restarts: int, *history: tuple[str, Any]) -> Lifecycle:
    """A model to which this happened, as (what, its arguments)."""
    model = Lifecycle(restarts)
    for what, arguments in history:
        getattr(model, what)(*arguments)
    return model


_FAILED = ("failed", (0.0, "died"))
_LOADING = ("loading", ())
_SERVING = ("serving", (0.0,))


@pytest.mark.parametrize(
    ("history", "phase", "attempts"),
    [
        ([], Phase.LOADING, 0),
        ([_SERVING], Phase.SERVING, 0),
        ([_SERVING, _FAILED], Phase.DOWN, 1),
        ([_SERVING, _FAILED, _LOADING], Phase.LOADING, 1),
        ([_SERVING, _FAILED, _LOADING, _SERVING], Phase.SERVING, 1),
        ([_FAILED, _LOADING, _FAILED, _LOADING, _FAILED], Phase.GIVEN_UP, 2),
        (
            [_SERVING, _FAILED, _LOADING, _SERVING, _FAILED, _LOADING, _SERVING, _FAILED],
            Phase.GIVEN_UP,
            2,
        ),
        ([_FAILED, _LOADING, _FAILED, _LOADING, _FAILED, _SERVING], Phase.SERVING, 0),
        ([_SERVING, _FAILED, _LOADING, ("serving", (5.0,)), ("failed", (64.0, ""))], Phase.DOWN, 2),
        ([_SERVING, _FAILED, _LOADING, ("serving", (5.0,)), ("failed", (65.0, ""))], Phase.DOWN, 1),
        ([("given_up", ("no such file",))], Phase.GIVEN_UP, 0),
        ([_SERVING, ("unloaded", ())], Phase.UNLOADED, 0),
        ([_SERVING, _FAILED, ("unloaded", ()), _SERVING], Phase.SERVING, 0),
    ],
    ids=[
        "new",
        "loaded",
        "died",
        "tried",
        "healed",
        "never loads",
        "dies each time",
        "loaded by hand",
        "died too soon",
        "served a minute",
        "refused",
        "unloaded",
        "loaded again by hand",
    ],
)
def test_histories(history: list[tuple[str, Any]], phase: Phase, attempts: int) -> None:
    """With two restarts: what a model does after this happened to it."""
    model = _after(2, *history)
    assert (model.phase, model.attempts) == (phase, attempts)


def test_no_restarts() -> None:
    """With no restarts allowed, the first death is the last."""
    assert _after(0, _SERVING, _FAILED).phase is Phase.GIVEN_UP


def test_the_reason_is_kept_until_it_serves() -> None:
    """Whoever asks why a model is down gets the last reason."""
    model = _after(5, _SERVING, ("failed", (0.0, "first")), _LOADING, ("failed", (3.0, "second")))
    assert model.reason == "second"
    assert model.due == 3.0 + 1.0
    model.serving(9.0)
    assert model.reason == ""


@pytest.mark.parametrize(
    ("attempt", "seconds"),
    [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (7, 32), (8, 60), (9, 60), (10**6, 60)],
)
def test_waits_grow_up_to_a_minute(attempt: int, seconds: float) -> None:
    """The first attempt comes at once, each further one after twice the time."""
    assert delay(attempt) == seconds
