"""End a command at SIGTERM, Ctrl-C or a deadline, and let it clean up."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """The end of a command. asyncio lets no other exception of a signal handler through."""


class DeadlineReached(Stopped):
    """The end of a command by its own deadline."""


def raise_at_signals(deadline_s: float | None = None) -> None:
    """Raise Stopped at the first signal, or DeadlineReached at the deadline.

    Further signals are ignored: they must not interrupt the clean-up and the writing of results.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        ignore_signals()
        raise DeadlineReached if number == signal.SIGALRM else Stopped

    for number in (*SIGNALS, signal.SIGALRM):
        signal.signal(number, stop)
    signal.setitimer(signal.ITIMER_REAL, deadline_s or 0)


def ignore_signals() -> None:
    """Ignore the signals from now on.

    Python would report SIG_IGN for a signal that is pending as a race condition.
    """
    for number in (*SIGNALS, signal.SIGALRM):
        signal.signal(number, _ignore)


def ignores_signals() -> bool:
    """Return whether a signal was received, or signals are ignored for another reason."""
    return signal.getsignal(signal.SIGTERM) is _ignore


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass
