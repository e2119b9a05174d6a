"""Triton's trace contexts in the model's code, and its spans, without a server."""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_triton
import models
import numpy as np
import pytest
import scenarios
import traced
from fake_triton import InferenceTrace, Turn
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once
from scenarios import Scenario

from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.observability import tracing

# The traces of two requests: the IDs of the trace and of Triton's span in it.
_FIRST, _SECOND = ("11" * 16, "22" * 8), ("33" * 16, "44" * 8)
_ALONE = Turn(0)
_SECONDS = 30


@pytest.fixture
def provider(process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without OTEL_* variables and without a tracer provider."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    monkeypatch.setattr(tracing, "_SECONDS_TO_SEND", 60.0)


@pytest.fixture
def spans(provider: None) -> Iterator[InMemorySpanExporter]:
    """The spans of a tracer provider that the model's own code has set."""
    exporter = InMemorySpanExporter()
    tracer_provider = TracerProvider()
    tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(tracer_provider)
    yield exporter
    tracer_provider.shutdown()


class _Served:
    """A model that is loaded through the adapter."""

    def __init__(self, folder: Path, name: str) -> None:
        self.model = TritonPythonModel()
        arguments = fake_triton.arguments(traced.TABLE[name].lay_out(folder))
        self.document = json.loads(arguments["model_config"])
        self.model.initialize(arguments)

    def request(self, *ids: str, value: float = 1.0, turn: Turn = _ALONE) -> Any:
        """Return a request that Triton traces; without IDs, one that it does not."""
        x = np.full((1, 1), value, dtype=np.float32)
        inputs = fake_triton.request({"x": x}, self.document, "", turn).inputs()
        context = InferenceTrace(traced.context(*ids)) if ids else InferenceTrace()
        return fake_triton.InferenceRequest(inputs, "", turn=turn, trace=context)

    def run(self, *requests: Any) -> list[list[int]]:
        return [_values(response) for response in self.model.execute(list(requests))]

    def stream(self, *requests: Any) -> list[list[list[int]]]:
        assert self.model.execute(list(requests)) is None
        assert all(request.sender.ended.wait(_SECONDS) for request in requests)
        return [
            [_values(response) for response in request.sender.responses] for request in requests
        ]


def _values(response: Any) -> list[int]:
    assert response.error() is None, response.error().message()
    (y,) = response.output_tensors()
    values: list[int] = y.as_numpy().ravel().tolist()
    return values


def _ids(span: Any) -> list[int]:
    return traced.ends(f"{span.context.trace_id:x}", f"{span.context.span_id:x}")


def _parent(span: Any) -> tuple[str, str]:
    return f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}"


# --- contexts ----------------------------------------------------------------------------------


def test_batch(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """forward() runs in a child of the first traced request's span, with links to the others."""
    served = _Served(tmp_path, "plain")
    answers = served.run(served.request(), served.request(*_FIRST), served.request(*_SECOND))

    (span,) = spans.get_finished_spans()
    assert answers == [_ids(span)] * 3
    assert _parent(span) == _FIRST
    assert [f"{link.context.span_id:016x}" for link in span.links] == [_SECOND[1]]
    assert span.name == "forward"
    assert span.attributes == {
        "triton.model_name": "plain",
        "triton.model_version": "1",
        "torch_py_backend.requests": 3,
    }


def test_untraced_requests(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """A batch without a traced request has no span, even after a traced batch."""
    served = _Served(tmp_path, "plain")
    assert served.run(served.request(), served.request()) == [[0, 0]] * 2
    served.run(served.request(*_FIRST))
    spans.clear()
    assert served.run(served.request()) == [[0, 0]]
    assert spans.get_finished_spans() == ()


@pytest.mark.parametrize("name", ["hooked", "threaded"])
def test_hooks(name: str, tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """Hooks run in the context of their request, in any thread."""
    served = _Served(tmp_path, name)
    requests = served.request(*_FIRST), served.request(), served.request(*_SECOND)
    assert served.run(*requests) == [traced.ends(*_FIRST), [0, 0], traced.ends(*_SECOND)]


def test_sequences(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """A step of a sequence runs in the trace of its own request."""
    served = _Served(tmp_path, "sums")
    served.run(served.request(*_FIRST, turn=Turn(7, starts=True)))
    (answer,) = served.run(served.request(*_SECOND, turn=Turn(7, ends=True)))
    first, second = spans.get_finished_spans()
    assert answer == _ids(second)
    assert [_parent(first), _parent(second)] == [_FIRST, _SECOND]


@pytest.mark.parametrize("name", ["yields", "steps"])
def test_streams(name: str, tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """A stream has one span, which is current while any of its responses is made."""
    served = _Served(tmp_path, name)
    for ids in (_FIRST, _SECOND):
        ((*answers,),) = served.stream(served.request(*ids))
        span = _only_span(spans)
        assert answers == [_ids(span)] * 2
        assert (span.name, _parent(span)) == ("stream", ids)
        spans.clear()
    assert served.stream(served.request()) == [[[0, 0]] * 2]


def test_stream_that_fails(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """The span of a stream that fails has the status and the message of the error."""
    served = _Served(tmp_path, "yields")
    bad = served.request(*_FIRST, value=-1.0)
    served.model.execute([bad])
    assert bad.sender.ended.wait(_SECONDS)
    status = _only_span(spans).status
    assert not status.is_ok
    assert status.description == bad.sender.responses[-1].error().message()


def _only_span(spans: InMemorySpanExporter) -> Any:
    """Wait for the only span, which ends after the last response is sent."""
    deadline = time.monotonic() + _SECONDS
    while not spans.get_finished_spans():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    (span,) = spans.get_finished_spans()
    return span


def test_failure(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """A failed batch, and each part of it that is run again, has its own span."""
    served = _Served(tmp_path, "raises")
    bad = served.request(*_SECOND, value=-1.0)
    good, refused = served.model.execute([served.request(*_FIRST), bad])
    assert refused.error() is not None
    failed, *parts = spans.get_finished_spans()
    assert [span.status.is_ok for span in (failed, *parts)].count(True) == 1
    (succeeded,) = [span for span in parts if span.status.is_ok]
    assert _values(good) == _ids(succeeded)
    assert {_parent(span) for span in parts} == {_FIRST, _SECOND}
    assert len(failed.links) == 1


def test_call_of_another_model(
    tmp_path: Path, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of another model has the trace of its request."""
    contexts = []

    def plain(request: Any) -> Any:
        contexts.append(request.trace().get_context())
        (x,) = request.inputs()
        y = fake_triton.Tensor("y", np.zeros((len(x.as_numpy()), 2), dtype=np.int64))
        return fake_triton.InferenceResponse([y])

    monkeypatch.setitem(fake_triton.InferenceRequest.served, "plain", plain)
    served = _Served(tmp_path, "caller")
    served.run(served.request(*_FIRST), served.request(*_SECOND))
    served.run(served.request())
    assert contexts == [traced.context(*_FIRST), None]


# --- when it is enabled ----------------------------------------------------------------------


def test_off(tmp_path: Path, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TRACING false, traces are not read and OpenTelemetry is not imported."""

    def fail(request: Any) -> Any:
        raise AssertionError

    original = builtins.__import__

    def importing(name: str, *rest: Any, **more: Any) -> Any:
        caller = (rest[0] if rest else {}).get("__name__", "")
        assert not ((caller + ".").startswith("torch_py_backend.") and "opentelemetry" in name)
        return original(name, *rest, **more)

    monkeypatch.setattr(fake_triton.InferenceRequest, "trace", fail)
    monkeypatch.setattr(builtins, "__import__", importing)
    served = _Served(tmp_path, "off")
    assert served.run(served.request(*_FIRST)) == [[0, 0]]


def _negate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TritonPythonModel, Any]:
    """Load a model that does not use OpenTelemetry, in a process that has not imported it."""
    text = scenarios.config({"x": [4]}, {"y": [4]})
    scenario = Scenario("negate", scenarios.python(models.Negate), text)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.context")]:
        monkeypatch.delitem(sys.modules, name)
    model = TritonPythonModel()
    model.initialize(fake_triton.arguments(scenario.lay_out(folder)))
    x = fake_triton.Tensor("x", np.ones((1, 4), dtype=np.float32))
    context = InferenceTrace(traced.context(*_FIRST))
    return model, fake_triton.InferenceRequest([x], trace=context)


def test_unset_and_unused(tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OTEL_* variables, a model that does not use OpenTelemetry is not traced."""

    def fail(request: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(fake_triton.InferenceRequest, "trace", fail)
    model, request = _negate(tmp_path, monkeypatch)
    (response,) = model.execute([request])
    assert response.error() is None
    assert "opentelemetry.context" not in sys.modules


def test_unset_with_an_exporter(
    tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an exporter in OTEL_* variables, any model is traced."""
    with traced.Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        model, request = _negate(tmp_path, monkeypatch)
        model.execute([request])
        model.finalize()
        (span,) = collector.spans
    assert (span.name, span.trace, span.parent) == ("forward", *_FIRST)


def test_invalid_context(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """A request whose trace context is invalid is answered: clients send parts of it."""
    served = _Served(tmp_path, "plain")
    x = fake_triton.Tensor("x", np.ones((1, 1), dtype=np.float32))
    state = {"traceparent": f"00-{_FIRST[0]}-{_FIRST[1]}-01", "tracestate": '=,"\\'}
    fields: list[dict[str, object]] = [{"traceparent": 5}, {"traceparent": "00-no-01"}, {**state}]
    for context in ("{", "null", "[]", *map(json.dumps, fields)):
        served.run(fake_triton.InferenceRequest([x], trace=InferenceTrace(context)))


def _without_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(name)
        return original(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.fixture(params=["sdk", "server"])
def lacking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A process without OpenTelemetry, or on a server without traces."""
    lacks: str = request.param
    if lacks == "sdk":
        _without_sdk(monkeypatch)
    else:
        monkeypatch.delattr(fake_triton.InferenceRequest, "trace")
    return lacks


def test_unset_without_traces(lacking: str, tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """If TRACING is unset, a model is served without OpenTelemetry, and on old servers."""
    served = _Served(tmp_path, "hooked")
    x = fake_triton.Tensor("x", np.ones((1, 1), dtype=np.float32))
    request = served.request(*_FIRST) if lacking == "sdk" else fake_triton.InferenceRequest([x])
    assert served.run(request) == [[0, 0]]


def _load_error(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(fake_triton.TritonModelException) as error:
        _Served(tmp_path, name)
    assert message in str(error.value)


def test_required_without_traces(lacking: str, tmp_path: Path, provider: None) -> None:
    """TRACING true without OpenTelemetry, or on an old server, fails the load with the cure."""
    cures = {"sdk": "pip install 'torch-py-backend[tracing]'", "server": "Triton 24.04 or later"}
    _load_error("plain", cures[lacking], tmp_path)


# --- exporters ---------------------------------------------------------------------------------


def test_exported(tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an endpoint in OTEL_* variables, all spans are sent before the model is unloaded."""
    with traced.Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "digits")
        served = _Served(tmp_path, "plain")
        (answer,) = served.run(served.request(*_FIRST))
        served.model.finalize()
        (span,) = collector.spans
    assert (span.service, span.name, span.trace, span.parent) == ("digits", "forward", *_FIRST)
    assert answer == traced.ends(span.trace, span.id)


def test_exporter_that_fails(
    tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown exporter, or one that raises, fails the load, rather than losing all spans."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_TRACES_EXPORTER"):
        monkeypatch.setenv(name, name.lower())
        _load_error("plain", f"the exporter {name.lower()}, which is not", tmp_path / name)

    def fail() -> Any:
        raise ValueError("no certificate")

    entry: Any = SimpleNamespace(name="strict", load=lambda: fail)
    monkeypatch.setattr(tracing, "entry_points", lambda **_: [entry])
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "strict")
    _load_error("plain", "strict that OTEL_* variables name fails: ValueError: no cert", tmp_path)


def test_unreachable_collector(
    tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a collector, requests are answered and unloading does not wait long."""
    monkeypatch.setattr(tracing, "_SECONDS_TO_SEND", 0.1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    served = _Served(tmp_path, "plain")
    ((trace_id, _),) = served.run(served.request(*_FIRST))
    served.model.finalize()
    assert [trace_id] == traced.ends(_FIRST[0])
    # The thread goes on trying, and would log into other tests.
    for thread in threading.enumerate():
        if thread.name == "spans":
            thread.join(_SECONDS)


def test_exporter_none(tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_TRACES_EXPORTER none sends no spans; an empty value counts as unset."""
    for value in ("", " none , "):
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", value)
        _Served(tmp_path / value.strip(), "plain")
        assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
