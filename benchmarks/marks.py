"""A table in a document between two marks that name the program that writes it."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, program: str, table: str) -> None:
    """Write the table of a program between its marks, or at the end if there are none."""
    first = f"<!-- {program}: made by python -m benchmarks.{program} -->"
    last = f"<!-- end of {program} -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(first)
    after = rest.partition(last)[2]
    marked = f"{first}\n{table}\n{last}"
    path.write_text(f"{before.rstrip()}\n\n{marked}\n{after}", encoding="utf-8")
