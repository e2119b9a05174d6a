"""The difference of two readings of Triton's statistics."""

from __future__ import annotations

from typing import Any

import pytest

from torch_py_backend.tools import server_statistics
from torch_py_backend.tools.server_statistics import Measurement

_NOTHING = Measurement(requests=0, failures=0, stages={}, batches={})


def _version(count: int, nanoseconds: int, batches: dict[int, int], fail: int = 0) -> Any:
    """Return a version's statistics as of HTTP."""
    spent = {"count": count, "ns": nanoseconds}
    stages = dict.fromkeys(("success", *server_statistics.STAGES), spent)
    return {
        "name": "m",
        "inference_stats": {**stages, "fail": {"count": fail, "ns": 5}},
        "batch_stats": [
            {"batch_size": size, "compute_infer": {"count": calls, "ns": 7}}
            for size, calls in batches.items()
        ],
    }


def _as_grpc(value: Any) -> Any:
    """Return statistics as protobuf's JSON: without zeros, large numbers as strings."""
    if isinstance(value, dict):
        return {key: _as_grpc(one) for key, one in value.items() if one not in (0, [])}
    if isinstance(value, list):
        return [_as_grpc(one) for one in value]
    return str(value) if isinstance(value, int) else value


_BEFORE = {"model_stats": [_version(10, 1_000_000, {1: 4, 2: 3})]}
_AFTER = {"model_stats": [_version(30, 41_000_000, {1: 4, 2: 5, 4: 4}, fail=2)]}
_DIFFERENCE = Measurement(
    requests=20,
    failures=2,
    stages=dict.fromkeys(server_statistics.STAGES, 0.002),
    batches={2: 2, 4: 4},
)


@pytest.mark.parametrize("convert", [dict, _as_grpc], ids=["http", "grpc"])
def test_between(convert: Any) -> None:
    """Counts are differences; times are means of the requests between the readings."""
    measurement = server_statistics.between(convert(_BEFORE), convert(_AFTER))
    assert measurement == _DIFFERENCE
    assert (measurement.calls, measurement.rows) == (6, 20)


def test_versions_are_added_up() -> None:
    """Versions are added up, including new ones."""
    more = {"model_stats": [*_AFTER["model_stats"], _version(5, 10_000_000, {4: 1})]}
    measurement = server_statistics.between(_BEFORE, more)
    assert measurement.requests == 25
    assert measurement.batches == {2: 2, 4: 5}


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {}), (_AFTER, _AFTER), ({"model_stats": [{"name": "m"}]}, {"model_stats": []})],
    ids=["nothing", "no-change", "bare"],
)
def test_nothing_happened(before: Any, after: Any) -> None:
    """Without a request, counts are zero and there are no stages."""
    assert server_statistics.between(before, after) == _NOTHING
