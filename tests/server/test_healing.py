"""When a model is loaded again: histories of transitions, without clocks or processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import pytest

from torch_py_backend.server import healing
from torch_py_backend.server.healing import Lifecycle, Phase, Transition, delay

History: TypeAlias = "Sequence[Transition | tuple[Transition, float]]"

_LOADED = [healing.DUE, healing.LOADED]
_HEALED = [healing.DIED, healing.DUE, healing.RELOADED]


def _after(history: History, restarts: int = 2) -> Lifecycle:
    """Return a model after transitions, at time 0 unless a transition has its own."""
    model = Lifecycle(restarts)
    for entry in history:
        transition, now = entry if isinstance(entry, tuple) else (entry, 0.0)
        assert model.handle(transition, now, "died")
    return model


@pytest.mark.parametrize(
    ("history", "phase", "attempts"),
    [
        pytest.param(_LOADED, Phase.SERVING, 0, id="loaded"),
        pytest.param([*_LOADED, healing.DIED], Phase.DOWN, 1, id="died"),
        pytest.param([*_LOADED, *_HEALED], Phase.SERVING, 1, id="healed"),
        pytest.param([healing.DUE, healing.LOAD_FAILED] * 3, Phase.GIVEN_UP, 2, id="never loads"),
        pytest.param(
            [*_LOADED, *_HEALED * 2, healing.DIED], Phase.GIVEN_UP, 2, id="dies each time"
        ),
        pytest.param(
            [*[healing.DUE, healing.LOAD_FAILED] * 3, healing.USER_LOADED, healing.DIED],
            Phase.DOWN,
            1,
            id="loaded by a user",
        ),
        pytest.param(
            [*_LOADED, *_HEALED[:2], (healing.RELOADED, 5.0), (healing.DIED, 64.0)],
            Phase.DOWN,
            2,
            id="served for less than a minute",
        ),
        pytest.param(
            [*_LOADED, *_HEALED[:2], (healing.RELOADED, 5.0), (healing.DIED, 65.0)],
            Phase.DOWN,
            1,
            id="served for a minute",
        ),
        pytest.param([healing.DUE, healing.REFUSED], Phase.GIVEN_UP, 0, id="refused"),
        pytest.param(
            [*_LOADED, *_HEALED, healing.USER_UNLOADED, healing.USER_LOADED],
            Phase.SERVING,
            0,
            id="unloaded and loaded by a user",
        ),
    ],
)
def test_phase_and_attempts_after_a_history(history: History, phase: Phase, attempts: int) -> None:
    """A model is loaded again twice, and as often again once it has served for a minute."""
    model = _after(history)
    assert (model.phase, model.attempts) == (phase, attempts)


def test_no_restarts() -> None:
    """Without restarts, the first death is the last."""
    assert _after([*_LOADED, healing.DIED], restarts=0).phase is Phase.GIVEN_UP


def test_transitions_have_an_effect_in_their_phases_only() -> None:
    """In other phases, nothing changes; every phase can be left."""
    transitions = [value for value in vars(healing).values() if isinstance(value, Transition)]
    for phase, transition in itertools.product(Phase, transitions):
        model = Lifecycle(1, phase)
        effect = model.handle(transition, 0.0)
        assert (effect is not None) == (phase in transition.before)
        assert model.phase is (transition.after if effect else phase)
    left = {phase for transition in transitions for phase in transition.before}
    assert left == set(Phase)


def test_reason_and_event_texts() -> None:
    """The reason is kept until the model serves; texts name the delay and the attempts."""
    model = _after(_LOADED)
    died = model.handle(healing.DIED, 10.0, "first {0}")
    assert died
    assert died.text == "first {0}; loading it again now (attempt 1 of 2)"
    assert model.handle(healing.DUE, 10.0)
    assert model.reason == "first {0}"
    failed = model.handle(healing.LOAD_FAILED, 12.0, "second")
    assert failed
    assert failed.text == "second; loading it again in 1 s (attempt 2 of 2)"
    assert (model.reason, model.due) == ("second", 13.0)
    assert model.handle(healing.DUE, 13.0)
    reloaded = model.handle(healing.RELOADED, 14.5)
    assert reloaded
    assert reloaded.text == "serves again after 4.5 s"
    assert model.reason == ""
    ended = model.handle(healing.DIED, 15.0, "third")
    assert ended
    assert ended.text.startswith("third; loaded again 2 times without success, stays down until")


@pytest.mark.parametrize(
    ("attempt", "seconds"),
    [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (7, 32), (8, 60), (9, 60), (10**6, 60)],
)
def test_delays_grow_up_to_a_minute(attempt: int, seconds: float) -> None:
    """The first attempt is made at once, each further one after twice the delay."""
    assert delay(attempt) == seconds
