"""Bisection: find the items that make a batch fail by running its halves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
F = TypeVar("F")

# The most calls for the bisection of one batch: enough for 64 items.
MAX_CALLS = 128


def bisect(
    items: Sequence[T],
    attempt: Callable[[Sequence[T]], Sequence[R] | F],
    failure: F,
    *,
    hopeless: Callable[[], bool],
    calls: int = MAX_CALLS,
) -> list[R | F]:
    """Return one result or failure for each item of a batch that failed as a whole.

    Run the halves of each failed range, the larger ranges first, until a failed range has one
    item. k failing items of n cost at most 2 k log2(n) calls, and never more than 2 n - 2.

    Args:
        items: the batch.
        attempt: runs some of the items, in order; returns one result each, or the failure.
        failure: the failure of the whole batch.
        hopeless: called after each failure; returns whether no further call can succeed. All
            undecided items then get the last failure.
        calls: the most calls of `attempt`. Items that are undecided then keep the failure of their
            range.
    """
    results: list[R | F] = [failure] * len(items)
    failed = deque([(0, len(items))])
    while failed:
        start, stop = failed.popleft()
        middle = (start + stop) // 2
        halves = ((start, middle), (middle, stop)) if stop - start > 1 else ()
        for first, last in halves:
            if calls == 0:
                return results
            calls -= 1
            result = attempt(items[first:last])
            # Only the class distinguishes a failure from a sequence of results.
            if not isinstance(result, type(failure)):
                results[first:last] = result  # type: ignore[assignment]
                continue
            results[first:last] = [result] * (last - first)
            failed.append((first, last))
            if hopeless():
                for begin, end in (*failed, (first, stop)):
                    results[begin:end] = [result] * (end - begin)
                return results
    return results
