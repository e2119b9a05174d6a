"""How many rows fit in memory, for each shape: learnt when memory runs out, forgotten slowly."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from torch_py_backend.batching.gather_scatter import Rows

# Shapes that are remembered; beyond them the oldest is forgotten.
_SHAPES = 64
# Batches that must go well in smaller calls before a larger one is tried; each time that fails,
# twice as many, so that what never fits is tried ever more rarely.
_PATIENCE = 64
_MOST_PATIENCE = 16_384


@dataclass(slots=True)
class Limit:
    """Of one shape: `safe` rows went well, up to `most` are tried."""

    safe: int
    most: int
    patience: int = _PATIENCE
    good: int = 0


class Capacity:
    """The row counts that one model's calls are kept to.

    Attributes:
        limits: by shape; empty, as long as memory has never run out.

    Args:
        rows: the row counts that the model takes.
    """

    def __init__(self, rows: Rows) -> None:
        self.limits: dict[Hashable, Limit] = {}
        self._rows = rows

    def most(self, shape: Hashable) -> int | None:
        """The most rows that one call of this shape may have; None: any number."""
        limit = self.limits.get(shape)
        return None if limit is None else limit.most

    def failed(self, shape: Hashable, rows: int) -> int | None:
        """So many rows did not fit. The most to be tried next; None: no call is smaller."""
        called = self._called(rows)
        less = self._rows.below(called)
        if less is None:
            return None
        limit = self.limits.get(shape)
        if limit is not None and limit.safe < called:
            limit.most, limit.good = limit.safe, 0
            limit.patience = min(2 * limit.patience, _MOST_PATIENCE)
            return limit.most
        if limit is None and len(self.limits) >= _SHAPES:
            del self.limits[next(iter(self.limits))]
        patience = _PATIENCE if limit is None else limit.patience
        self.limits[shape] = Limit(less, less, patience)
        return less

    def fitted(self, shape: Hashable, rows: int) -> None:
        """A batch of so many rows went well, in calls of at most `most`."""
        limit = self.limits.get(shape)
        if limit is None or rows <= limit.safe:
            return
        # What was called, filling included: a limit that is no row count of a call would not limit.
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
        """What is known of a shape, to be restored."""
        limit = self.limits.get(shape)
        return None if limit is None else replace(limit)

    def restore(self, shape: Hashable, limit: Limit | None) -> None:
        """Forget what was learnt since: it was one request that does not fit at all."""
        if limit is None:
            self.limits.pop(shape, None)
        else:
            self.limits[shape] = limit

    def _called(self, rows: int) -> int:
        """The rows of the call that a batch of so many became."""
        most = self._rows.most
        return self._rows.filled(rows if most is None else min(rows, most))
