"""The table of metrics."""

from __future__ import annotations

import re

from torch_py_backend.observability import metric_families
from torch_py_backend.observability.metric_families import Family, MetricKind

# Labels that Prometheus sets itself or would rename.
_RESERVED = {"job", "instance", "quantile"}


def test_names() -> None:
    """Counters end in `_total`, and no label is reserved."""
    for row in metric_families.TABLE:
        _check(row)


def _check(row: Family) -> None:
    assert re.fullmatch(r"pytorch_py_[a-z]+(_[a-z]+)*", row.name)
    assert row.name.endswith("_total") == (row.kind is MetricKind.COUNTER)
    assert row.labels[:2] == ("model", "version")
    assert len(set(row.labels)) == len(row.labels)
    assert not _RESERVED & set(row.labels)
