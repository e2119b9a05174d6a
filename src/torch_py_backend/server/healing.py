"""When a model that fell is loaded again, and when it is given up: without clocks or processes.

LOADING ──served──▶ SERVING ──fell──▶ DOWN ──try_again──▶ LOADING
   │ fell                 ▲              │ too often
   ├──────▶ DOWN          │              ▼
   │ refused           served        GIVEN_UP
   └──────▶ GIVEN_UP ─────┘
RELEASED: somebody unloaded it through Triton's API; served when somebody loads it there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

_FIRST_S = 1.0
_LONGEST_S = 60.0
_SOUND_AFTER_S = 60.0


class Phase(Enum):
    LOADING = "is being loaded"
    SERVING = "serves"
    DOWN = "is down"
    GIVEN_UP = "stays down"
    RELEASED = "was unloaded"


@dataclass(slots=True)
class Recovery:
    """One model: what it does, and what is done about it.

    Times are seconds of any clock that only grows.

    Attributes:
        restarts: how often it is loaded again, until it has served for a minute.
        phase: what it does.
        reason: why it is down.
        attempts: how often it was loaded again since it last served for a minute.
        due: when it is loaded again, while it is down.
    """

    restarts: int
    phase: Phase = Phase.LOADING
    reason: str = ""
    attempts: int = 0
    due: float = field(default=0.0)
    _since: float = field(default=0.0)

    def served(self, now: float) -> None:
        """It was loaded, by us or by somebody else."""
        if self.phase in (Phase.GIVEN_UP, Phase.RELEASED):
            self.attempts = 0
        self.phase, self.reason, self._since = Phase.SERVING, "", now

    def fell(self, now: float, reason: str) -> None:
        """An instance died or hangs, or a load ended in its death."""
        if self.phase is Phase.SERVING and now - self._since >= _SOUND_AFTER_S:
            self.attempts = 0
        self.reason = reason
        if self.attempts >= self.restarts:
            self.phase = Phase.GIVEN_UP
            return
        self.phase = Phase.DOWN
        self.attempts += 1
        self.due = now + delay(self.attempts)

    def try_again(self) -> None:
        """It is being loaded again."""
        self.phase = Phase.LOADING

    def refused(self, reason: str) -> None:
        """It stays down until somebody loads it."""
        self.phase, self.reason = Phase.GIVEN_UP, reason

    def released(self) -> None:
        """Somebody else unloaded it: it shall not serve."""
        self.phase, self.reason, self.attempts = Phase.RELEASED, "", 0


def delay(attempt: int) -> float:
    """Seconds to wait before an attempt, counted from 1: the first comes at once."""
    if attempt <= 1:
        return 0.0
    # The exponent is bounded: what is raised must stay a number.
    return min(_LONGEST_S, _FIRST_S * 2.0 ** min(attempt - 2, 16))
