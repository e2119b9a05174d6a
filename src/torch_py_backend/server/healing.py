"""The state machine that decides when a failed model is loaded again, without clocks or processes.

LOADING ──serving──▶ SERVING ──failed──▶ DOWN ──loading──▶ LOADING
   │ failed                ▲               │ no restarts left
   ├──────▶ DOWN           │               ▼
   │ given_up           serving         GIVEN_UP
   └──────▶ GIVEN_UP ──────┘
UNLOADED: the model was unloaded through Triton's API; it serves again once it is loaded there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 60.0
# A model that has served for this long may be loaded again as often as at first.
_STABLE_AFTER_S = 60.0


class Phase(Enum):
    LOADING = "is being loaded"
    SERVING = "serves"
    DOWN = "is down"
    GIVEN_UP = "stays down"
    UNLOADED = "was unloaded"


@dataclass(slots=True)
class Lifecycle:
    """The phase of one model.

    Times are seconds of a monotonic clock.

    Attributes:
        restarts: how often the model is loaded again, until it has served for a minute.
        phase: the phase.
        reason: why the model does not serve.
        attempts: how often it was loaded again since it last served for a minute.
        due: when it is loaded again, in the phase DOWN.
    """

    restarts: int
    phase: Phase = Phase.LOADING
    reason: str = ""
    attempts: int = 0
    due: float = field(default=0.0)
    _since: float = field(default=0.0)

    def serving(self, now: float) -> None:
        """Record that the model was loaded, by the supervisor or through Triton's API."""
        if self.phase in (Phase.GIVEN_UP, Phase.UNLOADED):
            self.attempts = 0
        self.phase, self.reason, self._since = Phase.SERVING, "", now

    def failed(self, now: float, reason: str) -> None:
        """Record that an instance died or hangs; plan the next load, or give up."""
        if self.phase is Phase.SERVING and now - self._since >= _STABLE_AFTER_S:
            self.attempts = 0
        self.reason = reason
        if self.attempts >= self.restarts:
            self.phase = Phase.GIVEN_UP
            return
        self.phase = Phase.DOWN
        self.attempts += 1
        self.due = now + delay(self.attempts)

    def loading(self) -> None:
        """Record that the model is being loaded again."""
        self.phase = Phase.LOADING

    def given_up(self, reason: str) -> None:
        """Record that the model is not loaded again, unless through Triton's API."""
        self.phase, self.reason = Phase.GIVEN_UP, reason

    def unloaded(self) -> None:
        """Record that the model was unloaded through Triton's API, and should not serve."""
        self.phase, self.reason, self.attempts = Phase.UNLOADED, "", 0


def delay(attempt: int) -> float:
    """Return the seconds to wait before an attempt, counted from 1, which does not wait."""
    if attempt <= 1:
        return 0.0
    # The exponent is bounded, so that the power does not overflow.
    return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(attempt - 2, 16))
