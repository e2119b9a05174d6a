"""What a model's batching costs, counted: rows and values, and how many of them are filling."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


def _count(doc: str) -> int:
    count: int = field(default=0, metadata={"doc": doc})
    return count


@dataclass(slots=True)
class Counts:
    """Totals since the model was loaded. A field is a metric: `pytorch_py_<name>_total`."""

    rows: int = _count("Rows that the model was called with, those that fill a bucket included")
    filled_rows: int = _count("Rows that only fill a bucket")
    values: int = _count("Values of padded inputs that the model was called with")
    padded_values: int = _count("Values that are only padding")


DOCS = {one.name: one.metadata["doc"] for one in fields(Counts)}
