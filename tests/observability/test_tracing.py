"""Triton's trace contexts in the model's code, and the spans around it, without a server."""

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

# Two requests' traces: the id of each, and of Triton's own span in it.
_FIRST, _SECOND = ("11" * 16, "22" * 8), ("33" * 16, "44" * 8)
_ALONE = Turn(0)
_SECONDS = 30


@pytest.fixture
def provider(process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nobody has said where spans go."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    monkeypatch.setattr(tracing, "_SECONDS_TO_SEND", 60.0)


@pytest.fixture
def spans(provider: None) -> Iterator[InMemorySpanExporter]:
    """Where spans go that the model's own code has seen to."""
    kept = InMemorySpanExporter()
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(made)
    yield kept
    made.shutdown()


class _Served:
    """A model that was loaded through the adapter."""

    def __init__(self, folder: Path, name: str) -> None:
        self.model = TritonPythonModel()
        given = fake_triton.arguments(traced.TABLE[name].lay_out(folder))
        self.document = json.loads(given["model_config"])
        self.model.initialize(given)

    def request(self, *ids: str, value: float = 1.0, turn: Turn = _ALONE) -> Any:
        """A request that Triton traces; without ids one that it does not."""
        x = np.full((1, 1), value, dtype=np.float32)
        made = fake_triton.request({"x": x}, self.document, "", turn)
        told = InferenceTrace(traced.context(*ids)) if ids else InferenceTrace()
        return fake_triton.InferenceRequest(made.inputs(), "", turn=turn, trace=told)

    def ask(self, *requests: Any) -> list[list[int]]:
        return [_told(response) for response in self.model.execute(list(requests))]

    def stream(self, *requests: Any) -> list[list[list[int]]]:
        assert self.model.execute(list(requests)) is None
        assert all(request.sender.ended.wait(_SECONDS) for request in requests)
        return [[_told(one) for one in request.sender.responses] for request in requests]


def _told(response: Any) -> list[int]:
    assert response.error() is None, response.error().message()
    (y,) = response.output_tensors()
    told: list[int] = y.as_numpy().ravel().tolist()
    return told


def _ids(span: Any) -> list[int]:
    return traced.ends(f"{span.context.trace_id:x}", f"{span.context.span_id:x}")


def _parent(span: Any) -> tuple[str, str]:
    return f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}"


# --- contexts ----------------------------------------------------------------------------------


def test_batch(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """forward() runs in a span: a child of the first traced request's, that links to the others."""
    served = _Served(tmp_path, "plain")
    answers = served.ask(served.request(), served.request(*_FIRST), served.request(*_SECOND))

    (span,) = spans.get_finished_spans()
    assert answers == [_ids(span)] * 3
    assert _parent(span) == _FIRST
    assert [f"{one.context.span_id:016x}" for one in span.links] == [_SECOND[1]]
    assert span.name == "forward"
    assert span.attributes == {
        "triton.model_name": "plain",
        "triton.model_version": "1",
        "torch_py_backend.requests": 3,
    }


def test_nothing_is_traced(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """A batch without a traced request has no span; nor does what comes after one that had."""
    served = _Served(tmp_path, "plain")
    assert served.ask(served.request(), served.request()) == [[0, 0]] * 2
    served.ask(served.request(*_FIRST))
    spans.clear()
    assert served.ask(served.request()) == [[0, 0]]
    assert spans.get_finished_spans() == ()


@pytest.mark.parametrize("name", ["hooked", "threaded"])
def test_hooks(name: str, tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """What runs for one request runs in that one's context, in whatever thread."""
    served = _Served(tmp_path, name)
    requests = served.request(*_FIRST), served.request(), served.request(*_SECOND)
    assert served.ask(*requests) == [traced.ends(*_FIRST), [0, 0], traced.ends(*_SECOND)]


def test_sequences(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """A step runs in its own request's trace, with its state."""
    served = _Served(tmp_path, "sums")
    served.ask(served.request(*_FIRST, turn=Turn(7, starts=True)))
    (answer,) = served.ask(served.request(*_SECOND, turn=Turn(7, ends=True)))
    first, second = spans.get_finished_spans()
    assert answer == _ids(second)
    assert [_parent(first), _parent(second)] == [_FIRST, _SECOND]


@pytest.mark.parametrize("name", ["yields", "steps"])
def test_streams(name: str, tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """A stream is a span from its beginning to its end, and current in all its responses."""
    served = _Served(tmp_path, name)
    for ids in (_FIRST, _SECOND):
        ((*answers,),) = served.stream(served.request(*ids))
        span = _ended(spans)
        assert answers == [_ids(span)] * 2
        assert (span.name, _parent(span)) == ("stream", ids)
        spans.clear()
    assert served.stream(served.request()) == [[[0, 0]] * 2]


def test_stream_that_fails(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """A stream that ends with an error has a span that says so."""
    served = _Served(tmp_path, "yields")
    bad = served.request(*_FIRST, value=-1.0)
    served.model.execute([bad])
    assert bad.sender.ended.wait(_SECONDS)
    status = _ended(spans).status
    assert not status.is_ok
    assert status.description == bad.sender.responses[-1].error().message()


def _ended(spans: InMemorySpanExporter) -> Any:
    """The only span; it ends after the last response was sent."""
    until = time.monotonic() + _SECONDS
    while not spans.get_finished_spans():
        assert time.monotonic() < until
        time.sleep(0.001)
    (span,) = spans.get_finished_spans()
    return span


def test_failure(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """A batch that fails, and each part that is tried again, is a span of its own."""
    served = _Served(tmp_path, "raises")
    bad = served.request(*_SECOND, value=-1.0)
    good, refused = served.model.execute([served.request(*_FIRST), bad])
    assert refused.error() is not None
    whole, *parts = spans.get_finished_spans()
    assert [one.status.is_ok for one in (whole, *parts)].count(True) == 1
    (fine,) = [one for one in parts if one.status.is_ok]
    assert _told(good) == _ids(fine)
    assert {_parent(one) for one in parts} == {_FIRST, _SECOND}
    assert len(whole.links) == 1


def test_call_of_another_model(
    tmp_path: Path, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton is given the trace that a call of another model belongs to."""
    seen = []

    def plain(request: Any) -> Any:
        seen.append(request.trace().get_context())
        (x,) = request.inputs()
        y = fake_triton.Tensor("y", np.zeros((len(x.as_numpy()), 2), dtype=np.int64))
        return fake_triton.InferenceResponse([y])

    monkeypatch.setitem(fake_triton.InferenceRequest.served, "plain", plain)
    served = _Served(tmp_path, "caller")
    served.ask(served.request(*_FIRST), served.request(*_SECOND))
    served.ask(served.request())
    assert seen == [traced.context(*_FIRST), None]


# --- whether ---------------------------------------------------------------------------------


def test_off(tmp_path: Path, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TRACING false nobody asks requests, and OpenTelemetry is not imported for it."""

    def asked(request: Any) -> Any:
        raise AssertionError

    imported = builtins.__import__

    def importing(name: str, *rest: Any, **more: Any) -> Any:
        caller = (rest[0] if rest else {}).get("__name__", "")
        assert not ((caller + ".").startswith("torch_py_backend.") and "opentelemetry" in name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(fake_triton.InferenceRequest, "trace", asked)
    monkeypatch.setattr(builtins, "__import__", importing)
    served = _Served(tmp_path, "off")
    assert served.ask(served.request(*_FIRST)) == [[0, 0]]


def _negate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TritonPythonModel, Any]:
    """A model that does not use OpenTelemetry, in a process that has not imported it."""
    text = scenarios.config({"x": [4]}, {"y": [4]})
    scenario = Scenario("negate", scenarios.python(models.Negate), text)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.context")]:
        monkeypatch.delitem(sys.modules, name)
    model = TritonPythonModel()
    model.initialize(fake_triton.arguments(scenario.lay_out(folder)))
    x = fake_triton.Tensor("x", np.ones((1, 4), dtype=np.float32))
    told = InferenceTrace(traced.context(*_FIRST))
    return model, fake_triton.InferenceRequest([x], trace=told)


def test_unset_where_nobody_sees_it(
    tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that does not use OpenTelemetry, where no variables say so: it is not imported."""

    def asked(request: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(fake_triton.InferenceRequest, "trace", asked)
    model, request = _negate(tmp_path, monkeypatch)
    (response,) = model.execute([request])
    assert response.error() is None
    assert "opentelemetry.context" not in sys.modules


def test_unset_where_variables_say_where_spans_go(
    tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an exporter in the environment there is a span, whatever the model's code imports."""
    with traced.Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        model, request = _negate(tmp_path, monkeypatch)
        model.execute([request])
        model.finalize()
        (span,) = collector.spans
    assert (span.name, span.trace, span.parent) == ("forward", *_FIRST)


@pytest.mark.parametrize(
    "told",
    [
        "{",
        "null",
        "[]",
        '{"traceparent": 5}',
        json.dumps({"traceparent": "00-nothing-01"}),
        json.dumps({"traceparent": f"00-{_FIRST[0]}-{_FIRST[1]}-01", "tracestate": '=,"\\'}),
    ],
)
def test_a_context_that_makes_no_sense(
    told: str, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """Part of it comes from the client: the request is answered all the same."""
    served = _Served(tmp_path, "plain")
    x = fake_triton.Tensor("x", np.ones((1, 1), dtype=np.float32))
    served.ask(fake_triton.InferenceRequest([x], trace=InferenceTrace(told)))


def test_completing_a_config_imports_none(tmp_path: Path) -> None:
    """The adapter, as Triton imports it to complete a config, leaves OpenTelemetry alone."""
    assert "import opentelemetry" not in Path(
        sys.modules["torch_py_backend.adapter"].__file__ or ""
    ).read_text(encoding="utf-8")


def _without_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(name)
        return found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_unset_without_the_sdk(
    tmp_path: Path, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless TRACING asks for it, a model is served where OpenTelemetry is not installed."""
    _without_sdk(monkeypatch)
    served = _Served(tmp_path, "hooked")
    assert served.ask(served.request(*_FIRST)) == [[0, 0]]


def test_unset_on_an_old_server(
    tmp_path: Path, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless TRACING asks for it, a model is served where requests cannot tell their traces."""
    monkeypatch.delattr(fake_triton.InferenceRequest, "trace")
    served = _Served(tmp_path, "hooked")
    x = fake_triton.Tensor("x", np.ones((1, 1), dtype=np.float32))
    assert served.ask(fake_triton.InferenceRequest([x])) == [[0, 0]]


def _asked_for(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(fake_triton.TritonModelException) as refusal:
        _Served(tmp_path, name)
    assert says in str(refusal.value)


def test_asked_for_without_the_sdk(
    tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRACING true where OpenTelemetry is missing fails the load with what to install."""
    _without_sdk(monkeypatch)
    _asked_for("plain", "pip install 'torch-py-backend[tracing]'", tmp_path)


def test_asked_for_on_an_old_server(
    tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRACING true where requests cannot tell their traces fails the load."""
    monkeypatch.delattr(fake_triton.InferenceRequest, "trace")
    _asked_for("plain", "expected Triton 24.04 or later", tmp_path)


# --- where spans go ----------------------------------------------------------------------------


def test_nowhere(tmp_path: Path, provider: None) -> None:
    """Without OTEL_* variables contexts are carried all the same, and nothing is sent."""
    served = _Served(tmp_path, "plain")
    assert served.ask(served.request(*_FIRST)) == [traced.ends(*_FIRST)]
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def test_exported(tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an endpoint in OTEL_* variables spans are there by the time that the model has ended."""
    with traced.Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "digits")
        served = _Served(tmp_path, "plain")
        (answer,) = served.ask(served.request(*_FIRST))
        served.model.finalize()
        (span,) = collector.spans
    assert (span.service, span.name, span.trace, span.parent) == ("digits", "forward", *_FIRST)
    assert answer == traced.ends(span.trace, span.id)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OTEL_TRACES_EXPORTER", "carrier pigeon", "the exporter carrier pigeon, which is not"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke", "the exporter smoke, which is not"),
    ],
)
def test_bad_variables(
    name: str,
    value: str,
    says: str,
    tmp_path: Path,
    provider: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A variable that asks for what is not there fails the load, rather than losing all spans."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    _asked_for("plain", says, tmp_path)


def test_exporter_that_fails(
    tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exporter that refuses what OTEL_* variables tell it fails the load, with its reason."""

    def refuses() -> Any:
        raise ValueError("no certificate")

    entry: Any = SimpleNamespace(name="strict", load=lambda: refuses)
    monkeypatch.setattr(tracing, "entry_points", lambda **_: [entry])
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "strict")
    _asked_for("plain", "strict that OTEL_* variables ask for fails: ValueError: no cert", tmp_path)


def test_collector_that_is_gone(
    tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a collector requests are answered, and an instance that ends is not kept waiting."""
    monkeypatch.setattr(tracing, "_SECONDS_TO_SEND", 0.1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    served = _Served(tmp_path, "plain")
    ((trace_id, _),) = served.ask(served.request(*_FIRST))
    served.model.finalize()
    assert [trace_id] == traced.ends(_FIRST[0])
    # It goes on to try, and would log into other tests.
    for one in threading.enumerate():
        if one.name == "spans":
            one.join(_SECONDS)


@pytest.mark.parametrize("value", ["none", "", " none , "])
def test_exporter_none(
    value: str, tmp_path: Path, provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OTEL_TRACES_EXPORTER none, as everywhere, sends nothing; empty is unset."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", value)
    _Served(tmp_path, "plain")
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
