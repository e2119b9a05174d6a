"""Medians with their extremes, and tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """The median, minimum and maximum of several values."""

    median: float
    least: float
    most: float

    def text(self, digits: int) -> str:
        """Return 1.02 (0.98..1.05)."""
        median, least, most = (f"{value:.{digits}f}" for value in self)
        return f"{median} ({least}..{most})"


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
