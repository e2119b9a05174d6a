"""When a failed model is reloaded: a table of transitions, without clocks or processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

_MAX_DELAY_S = 60.0
# A model that has served for this long may be reloaded as often as at first.
_STABLE_AFTER_S = 60.0


class Phase(Enum):
    NEW = "was not loaded yet"
    LOADING = "is being loaded"
    SERVING = "serves"
    DOWN = "is down"
    GIVEN_UP = "stays down"
    UNLOADED = "was unloaded"


class EventKind(Enum):
    READY = "READY"
    FAILED = "FAILED"
    DOWN = "DOWN"
    GIVEN_UP = "GIVEN UP"
    RELEASED = "RELEASED"
    CHANGED = "CHANGED"
    WARNING = "WARNING"


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a model's phase, for the user."""

    kind: EventKind
    model: str
    text: str = ""


class Action(Enum):
    LOAD = "load"
    UNLOAD = "unload"


@dataclass(frozen=True, slots=True)
class Transition:
    """A row of the table: what a model does after something happened to it.

    Attributes:
        before: the phases in which it has an effect.
        event: what is reported to the user; None: nothing.
        action: what the supervisor does.
    """

    before: tuple[Phase, ...]
    after: Phase
    event: EventKind | None = None
    text: str = ""
    action: Action | None = None


_NEW, _LOADING, _SERVING, _DOWN, _GIVEN_UP, _UNLOADED = Phase
_READY, _FAILED, _IS_DOWN, _IS_GIVEN_UP, _RELEASED, *_ = EventKind
_AGAIN = "{reason}; loading it again {when} (attempt {attempts} of {restarts})"
_NO_RESTARTS = (
    "{reason}; loaded again {times} without success, stays down until it is loaded through"
    " Triton's API"
)

# A first load, or a reload after a delay, is due. A first load succeeded; a reload succeeded.
DUE = Transition((_NEW, _DOWN), _LOADING, action=Action.LOAD)
LOADED = Transition((_LOADING,), _SERVING, _READY)
RELOADED = Transition((_LOADING,), _SERVING, _READY, "serves again after {seconds:.1f} s")

# Triton reports that a model serves, or does not serve any more, without the supervisor's doing.
ALREADY_LOADED = Transition((_NEW,), _SERVING, _READY)
USER_LOADED = Transition(
    (_DOWN, _GIVEN_UP, _UNLOADED), _SERVING, _READY, "loaded through Triton's API"
)
USER_UNLOADED = Transition(
    (_SERVING,), _UNLOADED, _RELEASED, "unloaded through Triton's API; not loaded again"
)

# An instance died, hangs or is poisoned; the same if the supervisor must not load models.
DIED = Transition((_LOADING, _SERVING, _UNLOADED), _DOWN, _IS_DOWN, _AGAIN, Action.UNLOAD)
DIED_UNCONTROLLED = Transition(
    (_SERVING, _UNLOADED), _GIVEN_UP, _IS_GIVEN_UP, "{reason}; Triton alone controls its models"
)

# An ensemble that Triton has unloaded with one of its parts, all of which serve again.
PARTS_SERVE = Transition((_SERVING,), _DOWN)

# An instance died whose model was loaded with files that the supervisor does not have.
DIED_WITH_FILES = Transition(
    DIED.before,
    _GIVEN_UP,
    _IS_GIVEN_UP,
    "{reason}; stays down until it is loaded again: its files came with the load request",
    Action.UNLOAD,
)

# An unload failed: it is repeated before the load, since Triton loads no model that is READY.
UNLOAD_FAILED = Transition((_DOWN,), _DOWN, _IS_DOWN, _AGAIN)

# A load failed: another load may succeed; would fail in the same way; failed because of a death
# that was reported already; never ends in Triton.
LOAD_FAILED = Transition((_LOADING,), _DOWN, _IS_DOWN, _AGAIN)
REFUSED = Transition((_NEW, _LOADING, _SERVING), _GIVEN_UP, _FAILED, "{reason}")
RELOAD_DIED = Transition((_NEW, _SERVING), _GIVEN_UP)
STUCK = Transition((_LOADING,), _GIVEN_UP, _IS_GIVEN_UP, "{reason}")


@dataclass(slots=True)
class Lifecycle:
    """The phase of one model. Times are seconds of a monotonic clock.

    Attributes:
        restarts: how often the model is reloaded, until it has served for a minute.
        since: when it last started or stopped to serve.
        reason: why it does not serve.
        attempts: how often it was reloaded since it last served for a minute.
        due: when it is reloaded, in the phase DOWN.
    """

    restarts: int
    phase: Phase = Phase.NEW
    since: float = 0.0
    reason: str = ""
    attempts: int = 0
    due: float = 0.0

    def handle(self, transition: Transition, now: float, reason: str = "") -> Transition | None:
        """Make a transition. Without restarts left, a model is given up instead of being DOWN.

        Returns:
            The transition, with the text of its event; None: it has no effect in this phase.
        """
        if self.phase not in transition.before:
            return None
        seconds = now - self.since
        was_stable = self.phase is Phase.SERVING and seconds >= _STABLE_AFTER_S
        if was_stable or self.phase in (Phase.GIVEN_UP, Phase.UNLOADED):
            self.attempts = 0
        if transition.after is Phase.DOWN and self.attempts >= self.restarts:
            transition = replace(transition, after=_GIVEN_UP, event=_IS_GIVEN_UP, text=_NO_RESTARTS)
        elif transition.after is Phase.DOWN:
            self.attempts += 1
            self.due = now + delay(self.attempts)
        if not {self.phase, transition.after} <= {Phase.LOADING, Phase.DOWN}:
            self.since = now
        if transition.after is not Phase.LOADING:
            self.reason = reason
        self.phase = transition.after
        text = transition.text.format(
            reason=reason,
            seconds=seconds,
            when=f"in {self.due - now:.0f} s" if self.due > now else "now",
            times="once" if self.attempts == 1 else f"{self.attempts} times",
            attempts=self.attempts,
            restarts=self.restarts,
        )
        return replace(transition, text=text)


def delay(attempt: int) -> float:
    """Return the seconds to wait before an attempt: 0 for the first one, 1, 2, 4 and so on."""
    return 0.0 if attempt <= 1 else min(_MAX_DELAY_S, 1 << (attempt - 2))
