"""Medians with their extremes, and tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
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


def write_table(path: Path, program: str, table: str) -> None:
    """Write the table of a program between its marks in a document, or at the end."""
    first = f"<!-- {program}: made by python -m benchmarks.{program} -->"
    last = f"<!-- end of {program} -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(first)
    after = rest.partition(last)[2]
    path.write_text(f"{before.rstrip()}\n\n{first}\n{table}\n{last}\n{after}", encoding="utf-8")
