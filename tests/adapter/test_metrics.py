"""The metrics of an instance, against the fake of Triton's utilities."""

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
import torch
from fake_triton import MetricFamily, TritonModelException
from instances import Served, load, logged, named, request, until
from scenarios import Scenario

from torch_py_backend.adapter import metrics
from torch_py_backend.engine import runtime

pytestmark = pytest.mark.usefixtures("process")

_SECONDS = 30


def judge(**parameters: str) -> Scenario:
    return Scenario("judge", scenarios.python(models.Judge), scenarios.x_to_y(4, **parameters))


def published(name: str, label: str = "") -> dict[str, float]:
    """Return the values of a series by one of its labels, without zeros."""
    return {
        metric.labels.get(label, ""): metric.value()
        for metric in MetricFamily.made.get(f"pytorch_py_{name}", ())
        if metric.value()
    }


_BRANCHES = """
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[1] > 9 else x * 2.0
"""
_COMPILED = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "eager"}', "WEIGHTS": "none"}
_COMPILES = Scenario(
    "compiled",
    scenarios.text(_BRANCHES),
    scenarios.config({"x": [-1]}, {"y": [-1]}, max_batch_size=2, parameters=_COMPILED),
)


def narrow(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return x * 2


_NARROW = Scenario("narrow", scenarios.python(narrow), scenarios.x_to_y(4, WARMUP="false"))
_RARE = (
    "from torch_py_backend.errors import CallError\n\n\ndef forward(x):\n"
    "    raise CallError('other', 'it is not there', code='NOT_FOUND')\n"
)


_CALLS = Scenario("calls", scenarios.text(_RARE), scenarios.x_to_y(4, WARMUP="false"))
_ALL_CODES = [
    [request(1, rows=3)],
    [request(2, rows=2), request(3), fake_triton.InferenceRequest([])],
    [request(-1), request(5, rows=2), request(-5), request(6)],
    [request(-6, rows=2)],
]
_COUNTS = {"OK": 5, "INTERNAL": 2, "INVALID_ARG": 1, "UNAVAILABLE": 1}
_FAILING = [[request(1), request(2), request(-1), request(4)]]
_GROWING = [[request(1), request(1, rows=2)], [request(1, rows=5)]]


@pytest.mark.parametrize(
    ("scenario", "batches", "codes", "retries"),
    [
        pytest.param(judge(), _ALL_CODES, _COUNTS, None, id="codes"),
        # [1 2], [-1 4], and [-1], [4]
        pytest.param(judge(), _FAILING, {"OK": 3, "INTERNAL": 1}, {"": 6}, id="retries"),
        pytest.param(_NARROW, _GROWING, {"OK": 2, "UNAVAILABLE": 1}, {"": 3}, id="memory"),
        # An error of another model may have any code: its series is created on demand.
        pytest.param(_CALLS, [[request(1)]], {"NOT_FOUND": 1}, {}, id="a rare code"),
    ],
)
def test_counters(
    scenario: Scenario,
    batches: list[list[Any]],
    codes: dict[str, float],
    retries: dict[str, float] | None,
    tmp_path: Path,
) -> None:
    """Requests are counted once by the code of their answer, rows that are run again by calls."""
    model = load(tmp_path, scenario)
    for batch in batches:
        model.execute(batch)
    model.finalize()
    assert published("requests_total", "code") == codes
    assert retries in (None, published("retried_rows_total"))


def test_streams(tmp_path: Path) -> None:
    """A stream is a request with the code of its end; its responses are counted separately."""
    served = Served(tmp_path, streamed.TABLE[0].scenario)
    sent = [served.request({"count": streamed.ints(n)}) for n in (3, 0, 9)]
    served.send(*sent, fake_triton.InferenceRequest([]))
    served.model.finalize()
    assert published("requests_total", "code") == {"OK": 2, "INTERNAL": 1, "INVALID_ARG": 1}
    assert published("stream_responses_total") == {"": 3 + 7}
    assert published("live_streams") == {}


def test_requests_that_only_fill_a_slot_are_not_counted(tmp_path: Path) -> None:
    served = Served(tmp_path, named("signals_uint64_direct"))
    x = {"x": np.ones((1, 4), dtype=np.float32)}
    served.send(served.request(x, turn=fake_triton.Turn(7, starts=True)), served.request(x))
    served.model.finalize()
    assert published("requests_total", "code") == {"OK": 1}


def test_compilation(tmp_path: Path) -> None:
    """Graphs of the warm-up, a cache miss, and a call that would need another graph are counted."""
    served = Served(tmp_path, _COMPILES)
    served.model._engine.counts.compile_cache["miss"] = 1  # inductor counts it: test_compile_cache
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    served.send(served.request({"x": np.ones((1, 12), dtype=np.float32)}))
    served.model.finalize()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert sum(published("compiled_graphs_total").values()) >= 1
    assert published("compile_cache_total", "result") == {"miss": 1}
    assert published("eager_calls_total") == {"": 1}


@pytest.fixture
def by_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are published by the test alone."""
    monkeypatch.setattr(metrics, "_SECONDS", _SECONDS)


@pytest.mark.usefixtures("by_the_test")
def test_an_idle_instance_sends_nothing_but_the_memory_of_each_gpu_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that stay 0 are set once: a server that has ended would never answer."""
    model = load(tmp_path, judge())
    name = "device_memory_allocated_bytes"
    assert f"pytorch_py_{name}" not in MetricFamily.made
    with monkeypatch.context() as patched:
        patched.setattr(fake_triton.Metric, "set", None)
        model._publisher.publish()
    assert model._publisher._table
    monkeypatch.setattr(runtime, "memory", lambda: [(0, 10), (3, 30)])
    model._publisher.publish()
    assert published(name, "device") == {"0": 10, "3": 30}
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
    with monkeypatch.context() as patched:
        patched.setattr(fake_triton.Metric, "increment", refuse)
        patched.setattr(fake_triton.Metric, "set", refuse)
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


@pytest.mark.usefixtures("by_the_test")
def test_published_series_are_those_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model publishes each row of the table, with its kind and labels, and no other."""
    monkeypatch.setattr(runtime, "memory", lambda: [(0, 10)])
    load(tmp_path, judge())
    rows = {row.name: row for row in metrics.TABLE}
    assert MetricFamily.made.keys() == rows.keys()
    for name, series in MetricFamily.made.items():
        row = rows[name]
        assert (MetricFamily.kinds[name] == MetricFamily.GAUGE) == (not row.grows)
        assert all(metric.labels.keys() == set(row.labels) for metric in series)
