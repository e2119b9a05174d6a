"""End a command at SIGTERM or Ctrl-C, and let it clean up."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """The end of a command. asyncio lets no other exception of a signal handler through."""


def raise_at_signals() -> None:
    """Raise Stopped at the first signal; further ones are ignored, and let the command clean up."""
    for number in SIGNALS:
        signal.signal(number, _stop)


def ignores_signals() -> bool:
    """Return whether a signal was received, or signals are ignored for another reason."""
    return signal.getsignal(signal.SIGTERM) is _ignore


def _stop(_number: int, _frame: FrameType | None) -> None:
    # Python would report SIG_IGN for a signal that is pending as a race condition.
    for number in SIGNALS:
        signal.signal(number, _ignore)
    raise Stopped


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass
