"""The metrics of an instance, against the fake of Triton's utilities."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_triton
import hooked
import models
import numpy as np
import pytest
import scenarios
import streamed
import torch
from fake_triton import MetricFamily, TritonModelException
from scenarios import Scenario
from torch import nn

from torch_py_backend.adapter import TritonPythonModel, metrics
from torch_py_backend.batching import runtime
from torch_py_backend.observability import metric_families
from torch_py_backend.observability.metric_families import MetricKind

_SECONDS = 30


def load(folder: Path, scenario: Scenario) -> TritonPythonModel:
    model = TritonPythonModel()
    model.initialize(fake_triton.completed(model, fake_triton.arguments(scenario.lay_out(folder))))
    return model


def judge(more: str = "", **parameters: str) -> Scenario:
    """Raises for some values."""
    text = scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters, more=more)
    return Scenario("judge", scenarios.python(models.Judge), text)


def request(value: float, rows: int = 1) -> Any:
    x = np.full((rows, 4), value, dtype=np.float32)
    return fake_triton.request({"x": x}, {"input": [{"name": "x", "dims": [4]}]})


def told(name: str, label: str = "") -> dict[str, float]:
    """Return the values of a series by one of its labels, without zeros."""
    return {
        one.labels.get(label, ""): one.value()
        for one in MetricFamily.made.get(f"pytorch_py_{name}", ())
        if one.value()
    }


_BRANCHES = (
    "from torch import nn\n\n\nclass Net(nn.Module):\n    def forward(self, x):\n"
    "        return x * 2 if x.shape[1] > 9 else x * 2.0\n"
)
_KINDS = {
    "plain": judge(),
    "buckets": judge(BATCH_BUCKETS="1,4,8"),
    "hooked": hooked.TABLE[0],
    "stepped": Scenario(
        "stepped",
        scenarios.text(streamed.CONTINUOUS),
        streamed.config({"start": "FP32", "count": "INT32"}, {"y": "FP32"}),
    ),
    "sequences": next(one for one in scenarios.SEQUENCES if one.name == "state_oldest"),
    "compiled": Scenario(
        "compiled",
        scenarios.text(_BRANCHES),
        scenarios.config(
            {"x": [-1]},
            {"y": [-1]},
            max_batch_size=2,
            parameters={
                "TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "eager"}',
                "WEIGHTS": "none",
            },
        ),
    ),
    "watched": Scenario(
        "watched",
        scenarios.both(
            scenarios.python(models.Affine), scenarios.saved(scenarios.affine().state_dict())
        ),
        scenarios.x_to_y(3, WATCH_WEIGHTS="true"),
    ),
}


# --- counters --------------------------------------------------------------------------------


def test_requests_by_code(tmp_path: Path, process: None) -> None:
    """Each request is counted once by the code of its answer, and batches by their rows."""
    model = load(tmp_path, judge())
    lacking = fake_triton.InferenceRequest([])
    model.execute([request(1, 3)])
    model.execute([request(2, 2), request(3), lacking])
    model.execute([request(-1), request(5, 2), request(-5), request(6)])
    model.execute([request(-6, 2)])
    model.finalize()

    assert told("requests_total", "code") == {
        "OK": 5, "INTERNAL": 2, "INVALID_ARG": 1, "UNAVAILABLE": 1,
    }  # fmt: skip
    # [3], [2 + 1], and the successful parts of the failed batch: [2] and [1].
    assert told("batch_rows_bucket", "le") == {"1": 1, "2": 2, "4": 4, "8": 4, "+Inf": 4}
    assert told("batch_rows_sum") == {"": 9}
    assert told("batch_rows_count") == {"": 4}


def test_retries(tmp_path: Path, process: None) -> None:
    """Of a batch of four with one bad request, halves are run again, and their halves."""
    model = load(tmp_path, judge())
    model.execute([request(1), request(2), request(-1), request(4)])
    model.finalize()

    # [1 2], [-1 4], and [-1], [4].
    assert told("retried_rows_total") == {"": 6}
    assert told("memory_splits_total") == {}
    assert told("batch_rows_sum") == {"": 3}


class Narrow(nn.Module):
    """Raises for more than two rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x * 2


def test_memory_that_runs_out(tmp_path: Path, process: None) -> None:
    """Five rows are run as two, two and one, after memory ran out once for five."""
    scenario = Scenario("narrow", scenarios.python(Narrow), scenarios.x_to_y(4, WARMUP="false"))
    model = load(tmp_path, scenario)
    model.execute([request(1, 5)])
    model.execute([request(1, 5)])
    model.finalize()

    assert told("memory_splits_total") == {"": 1}
    assert told("retried_rows_total") == {"": 5}
    assert told("batch_rows_bucket", "le") == {"1": 2, "2": 6, "4": 6, "8": 6, "+Inf": 6}
    assert told("requests_total", "code") == {"OK": 2}


def test_model_without_rows(tmp_path: Path, process: None) -> None:
    """Without a batch dimension a request is a batch of 1, whatever its shape."""
    text = scenarios.config({"x": [4]}, {"y": [4]}, max_batch_size=0)
    model = load(tmp_path, Scenario("plain", scenarios.python(models.Negate), text))
    one = {"x": np.ones(4, dtype=np.float32)}
    model.execute([fake_triton.request(one, {"input": [{"name": "x", "dims": [4]}]})])
    model.finalize()

    assert told("batch_rows_bucket", "le") == {"1": 1, "+Inf": 1}
    assert told("batch_rows_sum") == {"": 1}


_HOOKED = (
    "from torch import Tensor, nn\n\n\nclass Net(nn.Module):\n"
    "    def forward(self, x: Tensor) -> Tensor:\n        return x\n\n\n"
    "class Hooks:\n    def preprocess(self, x: Tensor) -> Tensor:\n"
    "        if (x < 0).any():\n            raise ValueError('negative')\n        return x\n\n"
    "    def postprocess(self, result: Tensor) -> Tensor:\n        return result + 1\n"
)


def test_models_with_hooks(tmp_path: Path, process: None) -> None:
    """Hooks' seconds are counted, and requests that preprocess() refuses."""
    model = load(tmp_path, Scenario("hooked", hooked.model(_HOOKED), scenarios.x_to_y(4)))
    model.execute([request(1, 2), request(-1), request(3)])
    model.finalize()

    assert told("requests_total", "code") == {"OK": 2, "INVALID_ARG": 1}
    assert told("batch_rows_sum") == {"": 3}
    assert set(told("stage_seconds_total", "stage")) == {
        *metric_families.STAGES,
        *metric_families.HOOK_STAGES,
    }


_TOOK = {
    "preprocess": 1,
    "gather": 2,
    "host to device": 4,
    "forward": 8,
    "device to host": 16,
    "postprocess": 32,
}


def test_seconds_of_stages(tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of each stage is counted for that stage."""
    model = load(tmp_path, Scenario("hooked", hooked.model(_HOOKED), scenarios.x_to_y(4)))
    now = [0.0]

    def around(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def taking(*given: Any, **named: Any) -> Any:
            now[0] += _TOOK[stage]
            return function(*given, **named)

        return taking if stage in _TOOK else function

    model._engine.instrument(around)
    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", lambda: now[0])
        model.execute([request(1, 1)])
    model.finalize()

    assert told("stage_seconds_total", "stage") == {
        stage.replace(" ", "_"): took for stage, took in _TOOK.items()
    }


def test_streams(tmp_path: Path, process: None) -> None:
    """A stream is a request with the code of its end; its responses are counted separately."""
    config = streamed.config({"count": "INT32"}, {"y": "FP32"})
    model = load(tmp_path, Scenario("ticker", scenarios.text(streamed.TICKER), config))
    document = {"input": [{"name": "count", "dims": [1]}]}
    sent = [fake_triton.request({"count": streamed.ints(n)}, document) for n in (3, 0, 9)]
    sent.append(fake_triton.InferenceRequest([]))
    model.execute(sent)
    for one in sent:
        assert one.sender.ended.wait(_SECONDS)
    model.finalize()

    assert told("requests_total", "code") == {"OK": 2, "INTERNAL": 1, "INVALID_ARG": 1}
    assert told("stream_responses_total") == {"": 3 + 7}
    assert told("live_streams") == {}
    assert told("batch_rows_count") == {"": 3}


def test_sequences_of_slots(tmp_path: Path, process: None) -> None:
    """Requests that only fill a slot are not counted."""
    (scenario,) = [one for one in scenarios.SEQUENCES if one.name == "signals_uint64_direct"]
    folder = scenario.lay_out(tmp_path)
    model = TritonPythonModel()
    given = fake_triton.completed(model, fake_triton.arguments(folder))
    model.initialize(given)
    document = json.loads(given["model_config"])
    x = {"x": np.ones((1, 4), dtype=np.float32)}
    turn = fake_triton.Turn(7, starts=True, ends=False)
    model.execute([fake_triton.request(x, document, turn=turn), fake_triton.request(x, document)])
    model.finalize()

    assert told("requests_total", "code") == {"OK": 1}


def test_compilation(tmp_path: Path, process: None) -> None:
    """Graphs of the warm-up, a cache miss, and a call that would need another graph are counted."""
    model = load(tmp_path, _KINDS["compiled"])
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    document = {"input": [{"name": "x", "dims": [-1]}]}
    x = np.ones((1, 12), dtype=np.float32)
    model.execute([fake_triton.request({"x": x}, document)])
    model.finalize()

    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert sum(told("compiled_graphs_total").values()) >= 1
    assert told("compile_cache_total", "result") == {"miss": 1}
    assert told("eager_calls_total") == {"": 1}


def test_rare_code(tmp_path: Path, process: None) -> None:
    """An error of another model may have any code: its series is created on demand."""
    code = (
        "from torch_py_backend.errors import CallError\n\n\ndef forward(x):\n"
        "    if (x < 0).any():\n"
        "        raise CallError('other', 'it is not there', code='NOT_FOUND')\n    return x\n"
    )
    model = load(tmp_path, Scenario("calls", scenarios.text(code), scenarios.x_to_y(4)))
    model.execute([request(-1)])
    model.finalize()

    assert told("requests_total", "code") == {"NOT_FOUND": 1}


def test_memory_of_gpus(tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GPU in use has its memory; on the CPU there are no such series."""
    model = load(tmp_path, judge())
    assert "pytorch_py_device_memory_allocated_bytes" not in MetricFamily.made
    monkeypatch.setattr(runtime, "memory", lambda: [(0, 10, 20), (3, 30, 40)])
    model._publisher.publish()

    assert told("device_memory_allocated_bytes", "device") == {"0": 10, "3": 30}
    assert told("device_memory_reserved_bytes", "device") == {"0": 20, "3": 40}
    monkeypatch.setattr(runtime, "memory", lambda: [(3, 30, 40)])  # device 0 was given back
    model._publisher.publish()
    assert told("device_memory_reserved_bytes", "device") == {"3": 40}
    model.finalize()
    assert told("device_memory_allocated_bytes", "device") == {}


# --- publishing ------------------------------------------------------------------------------


def _await(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + _SECONDS
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    assert holds()


def test_no_further_request_is_needed(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread publishes the last request's counts and a heartbeat."""
    monkeypatch.setattr(metrics, "_SECONDS", 0.01)
    model = load(tmp_path, judge())
    model.execute([request(1)])
    _await(lambda: told("requests_total", "code") == {"OK": 1})
    (beat,) = told("heartbeat_timestamp_seconds").values()
    _await(lambda: told("heartbeat_timestamp_seconds") != {"": beat})


def test_buckets_grow_from_the_last_one_down(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While values are published no bucket is above the next larger one."""
    monkeypatch.setattr(metrics, "_SECONDS", 3600)  # told here, and by nobody else
    model = load(tmp_path, judge())
    model.execute([request(1), request(2)])
    increment, seen = fake_triton.Metric.increment, []

    def incremented(metric: fake_triton.Metric, value: float) -> None:
        increment(metric, value)
        buckets = told("batch_rows_bucket", "le")
        seen.append([buckets.get(bound, 0) for bound in ("1", "2", "4", "8", "+Inf")])

    monkeypatch.setattr(fake_triton.Metric, "increment", incremented)
    model._publisher.publish()
    assert seen[-1] == [0, 1, 1, 1, 1]
    assert all(one == sorted(one) for one in seen)


def test_a_running_call(tmp_path: Path, process: None) -> None:
    """The duration of the running call is published, and so is the heartbeat."""
    model = load(tmp_path, judge())
    assert told("running_call_seconds") == {}
    model._status.busy()
    model._publisher.publish()
    (seconds,) = told("running_call_seconds").values()
    assert 0 < seconds < _SECONDS
    model._publisher.publish()
    assert told("running_call_seconds")[""] > seconds
    model.execute([request(1)])
    model._publisher.publish()
    assert told("running_call_seconds") == {}


def test_the_end(tmp_path: Path, process: None) -> None:
    """An instance that ends sets its gauges to 0, and its thread ends."""
    model = load(tmp_path, judge())
    assert told("ready_timestamp_seconds")
    (thread,) = [one for one in threading.enumerate() if one.name == "metrics"]
    model.execute([request(1)])
    model.finalize()

    assert not thread.is_alive()
    assert told("requests_total", "code") == {"OK": 1}
    assert told("ready_timestamp_seconds") == {}
    assert told("heartbeat_timestamp_seconds") == {}


def test_triton_that_refuses_values(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log says so once, and requests are still answered."""

    def refuse(metric: Any, value: float) -> None:
        raise TritonModelException("gone")

    monkeypatch.setattr(metrics, "_SECONDS", 0.01)
    model = load(tmp_path, judge())
    with monkeypatch.context() as patched:
        patched.setattr(fake_triton.Metric, "increment", refuse)
        patched.setattr(fake_triton.Metric, "set", refuse)
        _await(lambda: not model._publisher._thread.is_alive())
    (response,) = model.execute([request(1)])

    assert response.error() is None
    (line,) = [text for kind, text in fake_triton.Logger.lines if kind == "error"]
    assert line.startswith("model 'judge': publishing metrics failed.")


@pytest.mark.parametrize("kind", ["plain", "stepped", "sequences"])
def test_a_refusal_does_not_prevent_an_unload(
    kind: str, tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception from Triton's metrics prevents neither a fatal error's report nor an unload."""

    def refuse(metric: Any, value: float) -> None:
        raise TritonModelException("gone")

    model = load(tmp_path, _KINDS[kind])
    with monkeypatch.context() as patched:
        patched.setattr(fake_triton.Metric, "increment", refuse)
        patched.setattr(fake_triton.Metric, "set", refuse)
        model._on_fatal("the device is gone")
        model.finalize()

    errors = [text for kind, text in fake_triton.Logger.lines if kind == "error"]
    assert any("is poisoned and refuses all requests" in text for text in errors)


# --- at load ---------------------------------------------------------------------------------


def test_published_series_are_those_of_the_table(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of all kinds publish each row of the table, with its kind and labels, and no other."""
    monkeypatch.setattr(runtime, "memory", lambda: [(0, 10, 20)])
    instances = {kind: load(tmp_path / kind, scenario) for kind, scenario in _KINDS.items()}
    _await(lambda: bool(instances["watched"]._watcher.digest))
    for model in instances.values():
        model._publisher.publish()

    assert MetricFamily.made.keys() == metric_families.BY_SERIES.keys()
    for name, series in MetricFamily.made.items():
        row = metric_families.BY_SERIES[name]
        assert (MetricFamily.kinds[name] == MetricFamily.GAUGE) == (row.kind is MetricKind.GAUGE)
        labels = set(row.labels) - ({"le"} if not name.endswith("_bucket") else set())
        assert all(metric.labels.keys() == labels for metric in series)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pytorch_py_requests_total", MetricFamily.GAUGE),
        ("pytorch_py_batch_rows_sum", MetricFamily.HISTOGRAM),
        ("pytorch_py_poisoned", MetricFamily.COUNTER),
    ],
)
def test_a_name_that_is_taken(name: str, kind: int, tmp_path: Path, process: None) -> None:
    """The load fails with the name and what to do, and leaves no thread behind."""
    MetricFamily(name, "somebody else's", kind)
    with pytest.raises(TritonModelException) as refusal:
        load(tmp_path, judge())

    assert str(refusal.value) == (
        f"model 'judge': Triton refuses the metric {name} (Family name already exists with"
        " different type); expected a server where nothing else has a metric of that name and"
        " another kind. Rename the metric of the model or backend that has it, and restart the"
        " server: Triton keeps names until it ends."
    )
    assert not [one for one in threading.enumerate() if one.name == "metrics"]


def test_a_server_without_metrics(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server without metrics is queried once; the model serves."""

    def refuse(*_: Any, **__: Any) -> None:
        tried.append(1)
        raise TritonModelException("Error when creating MetricFamily: metrics not supported")

    tried: list[int] = []

    monkeypatch.setattr(MetricFamily, "__init__", refuse)
    monkeypatch.setattr(metrics.Metric, "supported", True)
    model = load(tmp_path, judge())
    (response,) = model.execute([request(1)])
    model.finalize()

    assert response.error() is None
    assert tried == [1]
    assert not MetricFamily.made
