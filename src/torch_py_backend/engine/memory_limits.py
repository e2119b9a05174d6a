"""Row limits by shape: learned when memory runs out, raised again step by step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from torch_py_backend.batching.gather_scatter import Rows

# The most shapes to remember; a further one replaces the oldest.
_MAX_SHAPES = 64
# The number of batches that must succeed in smaller calls before a larger call is tried. It
# doubles each time that the larger call fails.
_PATIENCE = 64
_MAX_PATIENCE = 16_384


@dataclass(slots=True)
class Limit:
    """The limit of one shape: calls of `safe` rows succeeded, calls of up to `most` are tried."""

    safe: int
    most: int
    patience: int = _PATIENCE
    good: int = 0


class MemoryLimits:
    """The row limits of one model's calls.

    Attributes:
        limits: the limits by shape; empty until memory runs out for the first time.
    """

    def __init__(self, rows: Rows) -> None:
        self.limits: dict[Hashable, Limit] = {}
        self._rows = rows

    def most(self, shape: Hashable) -> int | None:
        """Return the largest number of rows for one call of this shape; None: no limit."""
        limit = self.limits.get(shape)
        return None if limit is None else limit.most

    def failed(self, shape: Hashable, rows: int) -> int | None:
        """Lower the limit after a call of `rows` rows ran out of memory.

        Returns:
            The new limit; None: there is no smaller call.
        """
        called = self._called(rows)
        less = self._rows.below(called)
        if less is None:
            return None
        limit = self.limits.get(shape)
        if limit is not None and limit.safe < called:
            limit.most, limit.good = limit.safe, 0
            limit.patience = min(2 * limit.patience, _MAX_PATIENCE)
            return limit.most
        if limit is None and len(self.limits) >= _MAX_SHAPES:
            del self.limits[next(iter(self.limits))]
        patience = _PATIENCE if limit is None else limit.patience
        self.limits[shape] = Limit(less, less, patience)
        return less

    def fitted(self, shape: Hashable, rows: int) -> None:
        """Record a batch of `rows` rows that succeeded in calls of at most `most` rows."""
        limit = self.limits.get(shape)
        if limit is None or rows <= limit.safe:
            return
        # The filled size: only a size that calls have can act as a limit.
        called = self._called(min(rows, limit.most))
        if called > limit.safe:
            limit.safe, limit.good = called, 0
            if self._rows.most is not None and called >= self._rows.most:
                del self.limits[shape]
            return
        limit.good += 1
        if limit.good >= limit.patience:
            limit.most, limit.good = self._rows.above(limit.safe), 0

    def remembered(self, shape: Hashable) -> Limit | None:
        """Return a copy of a shape's limit, for `restore`."""
        limit = self.limits.get(shape)
        return None if limit is None else replace(limit)

    def restore(self, shape: Hashable, limit: Limit | None) -> None:
        """Restore a shape's limit: the failure was due to one request that never fits."""
        if limit is None:
            self.limits.pop(shape, None)
        else:
            self.limits[shape] = limit

    def _called(self, rows: int) -> int:
        """Return the number of rows, filling included, of the call for a batch of `rows` rows."""
        most = self._rows.most
        return self._rows.filled(rows if most is None else min(rows, most))
