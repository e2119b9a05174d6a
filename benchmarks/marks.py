"""A table in a document, between two marks that say which program makes it."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, program: str, table: str) -> None:
    """Put the table of `python -m benchmarks.<program>` between its marks; at first, at the end."""
    first = f"<!-- {program}: made by python -m benchmarks.{program} -->"
    last = f"<!-- end of {program} -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(first)
    after = rest.partition(last)[2]
    marked = f"{first}\n{table}\n{last}"
    path.write_text(f"{before.rstrip()}\n\n{marked}\n{after}", encoding="utf-8")
