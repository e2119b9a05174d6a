from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import fake_triton
import models
import numpy as np
import pytest
import scenarios
import streamed
from children import until
from fake_triton import MetricFamily, TritonModelException
from instances import Served, load, logged, named, request
from scenarios import Scenario

from torch_py_backend.adapter import metrics
from torch_py_backend.engine import runtime

pytestmark = pytest.mark.usefixtures("process")


def judge(**parameters: str) -> Scenario:
    return Scenario("judge", scenarios.python(models.Judge), scenarios.x_to_y(4, **parameters))


def published(name: str, label: str = "") -> dict[str, float]:
    """Return the values of a series by one of its labels, without zeros."""
    return {
        metric.labels.get(label, ""): metric.value()
        for metric in MetricFamily.made.get(f"pytorch_py_{name}", ())
        if metric.value()
    }


_RARE = """from torch_py_backend.errors import CallError


def forward(x):
    raise CallError('other', 'it is not there', code='NOT_FOUND')
"""
_CALLS = Scenario("calls", scenarios.text(_RARE), scenarios.x_to_y(4, WARMUP="false"))


def _count(number: int) -> Any:
    tensor = fake_triton.Tensor("count", streamed.ints(number))
    return fake_triton.InferenceRequest([tensor])


_ALL_CODES = [
    [request(1, rows=3)],
    [request(2, rows=2), request(3), fake_triton.InferenceRequest([])],
    [request(-1), request(5, rows=2), request(-5), request(6)],
    [request(-6, rows=2)],
]
_COUNTS = {"OK": 5, "INTERNAL": 2, "INVALID_ARG": 1, "UNAVAILABLE": 1}
_FAILING = [[request(1), request(2), request(-1), request(4)]]
_STREAMS = [[*map(_count, (3, 0, 9)), fake_triton.InferenceRequest([])]]
_ENDS = {"OK": 2, "INTERNAL": 1, "INVALID_ARG": 1}


@pytest.mark.parametrize(
    ("scenario", "batches", "codes", "others"),
    [
        pytest.param(judge(), _ALL_CODES, _COUNTS, {}, id="codes"),
        # [1 2], [-1 4], and [-1], [4]
        pytest.param(
            judge(), _FAILING, {"OK": 3, "INTERNAL": 1}, {"retried_rows_total": 6}, id="retries"
        ),
        # An error of another model may have any code: its series is created on demand.
        pytest.param(
            _CALLS, [[request(1)]], {"NOT_FOUND": 1}, {"retried_rows_total": 0}, id="a rare code"
        ),
        pytest.param(
            streamed.TABLE[0].scenario,
            _STREAMS,
            _ENDS,
            {"stream_responses_total": 3 + 7, "live_streams": 0},
            id="streams",
        ),
    ],
)
def test_counters(
    scenario: Scenario,
    batches: list[list[Any]],
    codes: dict[str, float],
    others: dict[str, float],
    tmp_path: Path,
) -> None:
    """Requests are counted once by the code of their answer, rows that are run again by calls."""
    served = Served(tmp_path, scenario)
    for batch in batches:
        served.send(*batch)
    served.model.finalize()
    assert published("requests_total", "code") == codes
    for name, value in others.items():
        assert published(name).get("", 0) == value


def test_requests_that_only_fill_a_slot_are_not_counted(tmp_path: Path) -> None:
    served = Served(tmp_path, named("signals_uint64_direct"))
    x = {"x": np.ones((1, 4), dtype=np.float32)}
    served.send(served.request(x, turn=fake_triton.Turn(7, starts=True)), served.request(x))
    served.model.finalize()
    assert published("requests_total", "code") == {"OK": 1}


def test_compilation(tmp_path: Path) -> None:
    """How it is counted: test_warmup and test_compilation in tests/engine."""
    model = load(tmp_path, judge())
    counts = model._engine.counts
    counts.compiled_graphs, counts.eager_calls = 3, 2
    counts.compile_cache["miss"] = 1
    model.finalize()
    assert published("compiled_graphs_total") == {"": 3}
    assert published("compile_cache_total", "result") == {"miss": 1}
    assert published("eager_calls_total") == {"": 2}


def test_an_idle_instance_sends_nothing_but_the_memory_of_each_gpu_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that stay 0 are set once: a server that has ended would never answer.

    The series are those of the table, with their kinds and labels, and no others.
    """
    monkeypatch.setattr(metrics, "_SECONDS", 30)  # the test alone publishes
    model = load(tmp_path, judge())
    name = "device_memory_allocated_bytes"
    assert f"pytorch_py_{name}" not in MetricFamily.made
    with mock.patch.object(fake_triton.Metric, "set", None):
        model._publisher.publish()
    assert model._publisher._table
    monkeypatch.setattr(runtime, "memory", lambda: [(0, 10), (3, 30)])
    model._publisher.publish()
    assert published(name, "device") == {"0": 10, "3": 30}
    rows = {row.name: row for row in metrics.TABLE}
    assert MetricFamily.made.keys() == rows.keys()
    for series, made in MetricFamily.made.items():
        assert (MetricFamily.kinds[series] == MetricFamily.GAUGE) == (not rows[series].grows)
        assert all(metric.labels.keys() == set(rows[series].labels) for metric in made)
    model.finalize()
    assert published(name, "device") == {}


def test_no_further_request_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread publishes the last request's counts and a running call; all gauges end with it."""
    monkeypatch.setattr(metrics, "_SECONDS", 0.01)
    model = load(tmp_path, judge())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "metrics"]
    model.execute([request(1)])
    until(lambda: published("requests_total", "code") == {"OK": 1})
    model.execute([request(1)])
    model._status.busy()
    until(lambda: published("running_call_seconds") != {})
    model.finalize()
    assert not thread.is_alive()
    assert published("requests_total", "code") == {"OK": 2}
    assert published("running_call_seconds") == {}


def test_triton_that_refuses_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says so once; requests, the report of a fatal error and an unload still work."""
    monkeypatch.setattr(metrics, "_SECONDS", 0.01)
    model = load(tmp_path, judge())
    refuse = mock.Mock(side_effect=TritonModelException("gone"))
    with mock.patch.multiple(fake_triton.Metric, increment=refuse, set=refuse):
        model._engine.counts.count_requests("OK")  # only values that change are published
        until(lambda: not model._publisher._table)
        refuse.assert_called_once()
        (line,) = logged("warn")
        assert "no more metrics are published: TritonModelException: gone." in line
        (response,) = model.execute([request(1)])
        assert response.error() is None
        model._engine.failures.poison("the device is gone")
        (response,) = model.execute([request(1)])
        assert "the device is gone" in response.error().message()
        model.finalize()
