"""A batch that failed is narrowed down by halves, until only the guilty items carry the error."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
F = TypeVar("F")


class Budget:
    """Calls that are left, to one bisection or to several of one batch."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def take(self) -> bool:
        """Take one call, if there is one left."""
        self._left -= 1
        return self._left >= 0


def narrow(
    items: Sequence[T],
    attempt: Callable[[Sequence[T]], Sequence[R] | F],
    failure: F,
    *,
    calls: Budget,
    hopeless: Callable[[], bool],
) -> list[R | F]:
    """One result or failure for each item of a batch that failed as a whole.

    The halves of what failed are run, the larger ones first; what fails alone is guilty. k guilty
    items of n cost at most 2 k log2(n) calls, and never more than 2 n - 2.

    Args:
        items: the batch.
        attempt: runs some of the items, in their order: one result each, or the failure.
        failure: that of the whole batch.
        calls: how often `attempt` may be called; what is undecided then keeps its failure.
        hopeless: asked after a failure: whether nothing can be run any more; all that is undecided
            then gets that failure.
    """
    found: list[R | F] = [failure] * len(items)
    failed = deque([(0, len(items))])
    while failed:
        start, stop = failed.popleft()
        middle = (start + stop) // 2
        halves = ((start, middle), (middle, stop)) if stop - start > 1 else ()
        for first, last in halves:
            if not calls.take():
                return found
            result = attempt(items[first:last])
            # A failure is whatever is of its class; results come as a sequence of their own.
            if not isinstance(result, type(failure)):
                found[first:last] = result  # type: ignore[assignment]
                continue
            found[first:last] = [result] * (last - first)
            failed.append((first, last))
            if hopeless():
                for begin, end in (*failed, (first, stop)):
                    found[begin:end] = [result] * (end - begin)
                return found
    return found
