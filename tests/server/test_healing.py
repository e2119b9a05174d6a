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
_RELOADED_AT_5 = [*_LOADED, *_HEALED[:2], (healing.RELOADED, 5.0)]
_FAILED = [healing.DUE, healing.LOAD_FAILED]


@pytest.mark.parametrize(
    ("history", "phase", "attempts"),
    [
        pytest.param(_LOADED, Phase.SERVING, 0, id="loaded"),
        pytest.param([*_LOADED, healing.DIED], Phase.DOWN, 1, id="died"),
        pytest.param([*_LOADED, *_HEALED], Phase.SERVING, 1, id="healed"),
        pytest.param(_FAILED * 3, Phase.GIVEN_UP, 2, id="never loads"),
        pytest.param([*_LOADED, *_HEALED * 2, healing.DIED], Phase.GIVEN_UP, 2, id="always dies"),
        pytest.param(
            [*_FAILED * 3, healing.USER_LOADED, healing.DIED], Phase.DOWN, 1, id="user loads"
        ),
        pytest.param([*_RELOADED_AT_5, (healing.DIED, 64.0)], Phase.DOWN, 2, id="served 59 s"),
        pytest.param([*_RELOADED_AT_5, (healing.DIED, 65.0)], Phase.DOWN, 1, id="served 60 s"),
        pytest.param([healing.DUE, healing.REFUSED], Phase.GIVEN_UP, 0, id="refused"),
        pytest.param(
            [*_LOADED, *_HEALED, healing.USER_UNLOADED, healing.USER_LOADED],
            Phase.SERVING,
            0,
            id="user unloads and loads",
        ),
    ],
)
def test_phase_and_attempts_after_a_history(history: History, phase: Phase, attempts: int) -> None:
    """A model is loaded again twice, and as often again once it has served for a minute."""
    model = Lifecycle(2)
    for entry in history:
        transition, now = entry if isinstance(entry, tuple) else (entry, 0.0)
        assert model.handle(transition, now, "died")
    assert (model.phase, model.attempts) == (phase, attempts)


def test_transitions_have_an_effect_in_their_phases_only() -> None:
    """In other phases, nothing changes; every phase can be left."""
    transitions = [value for value in vars(healing).values() if isinstance(value, Transition)]
    for phase, transition in itertools.product(Phase, transitions):
        model = Lifecycle(1, phase)
        effect = model.handle(transition, 0.0)
        assert (effect is not None) == (phase in transition.before)
        assert model.phase is (transition.after if effect else phase)
    assert {phase for transition in transitions for phase in transition.before} == set(Phase)


def test_reason_and_event_texts() -> None:
    """The reason is kept until the model serves; texts name the delay and the attempts."""
    model = Lifecycle(2, Phase.SERVING)
    no_restarts = "loaded again 2 times without success, stays down until it is loaded through"
    steps = (
        (healing.DIED, 10.0, "1st {0}", "1st {0}; loading it again now (attempt 1 of 2)"),
        (healing.DUE, 10.0, "", ""),
        (healing.LOAD_FAILED, 12.0, "2nd", "2nd; loading it again in 1 s (attempt 2 of 2)"),
        (healing.DUE, 13.0, "", ""),
        (healing.RELOADED, 14.5, "", "serves again after 4.5 s"),
        (healing.DIED, 15.0, "3rd", f"3rd; {no_restarts} Triton's API"),
    )
    reasons = []
    for transition, now, reason, text in steps:
        effect = model.handle(transition, now, reason)
        assert effect
        assert effect.text == text
        reasons.append(model.reason)
    assert reasons == ["1st {0}", "1st {0}", "2nd", "2nd", "", "3rd"]
    assert model.due == 13.0
    without_restarts = Lifecycle(0, Phase.SERVING)
    assert without_restarts.handle(healing.DIED, 0.0)
    assert without_restarts.phase is Phase.GIVEN_UP


@pytest.mark.parametrize(
    ("attempt", "seconds"), [(0, 0), (1, 0), (2, 1), (3, 2), (7, 32), (8, 60), (10**6, 60)]
)
def test_delays_grow_up_to_a_minute(attempt: int, seconds: float) -> None:
    """The first attempt is made at once, each further one after twice the delay."""
    assert delay(attempt) == seconds
