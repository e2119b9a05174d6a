"""Triton's spans and ours, from a real server to a collector: one trace from client to model."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc_streams
import numpy as np
import pytest
import serving
import traced
import tritonclient.grpc
import tritonclient.http
from traced import Collector, Span

from torch_py_backend.server import Server

_TRITON, _OURS = "triton-inference-server", "model"
_SECONDS = 120
_MODELS = ("plain", "together", "hooked", "yields", "caller")
_CLIENT = ("12" * 16, "34" * 8)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    """A server that traces every request with OpenTelemetry."""
    folder = tmp_path_factory.mktemp("tracing")
    for name in _MODELS:
        traced.TABLE[name].lay_out(folder / "repository")
    arguments = [
        "--trace-config=mode=opentelemetry",
        "--trace-config=rate=1",
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=opentelemetry,url={collector.url}/v1/traces",
        "--trace-config=opentelemetry,bsp_schedule_delay=100",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_SERVICE_NAME", _OURS)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with serving.running(folder, *arguments) as server:
            yield server


@pytest.fixture
def spans(server: Server, collector: Collector) -> Collector:
    """The collector of a running server's spans."""
    return collector


def _inputs(module: Any) -> list[Any]:
    return serving.infer_inputs(module, {"x": np.ones((1, 1), dtype=np.float32)})


def _ask(server: Server, name: str, **headers: str) -> list[int]:
    with tritonclient.http.InferenceServerClient(server.http_address) as client:
        result = client.infer(name, _inputs(tritonclient.http), headers=headers)
        told: list[int] = result.as_numpy("y").ravel().tolist()
        return told


def _whole(spans: list[Span], trace: int) -> dict[str, Span]:
    """The spans of one trace by their names."""
    return {one.name: one for one in spans if traced.ends(one.trace) == [trace]}


def test_one_trace(server: Server, spans: Collector) -> None:
    """The span around forward() is a child of Triton's span of the model."""
    trace, span = _ask(server, "plain")
    came = spans.wait(lambda all_: {"forward", "plain"} <= _whole(all_, trace).keys())
    found = _whole(came, trace)
    assert traced.ends(found["forward"].id) == [span]
    assert found["forward"].parent == found["plain"].id
    assert (found["forward"].service, found["plain"].service) == (_OURS, _TRITON)


def test_clients_trace(server: Server, spans: Collector) -> None:
    """A client's own trace, sent as W3C's header, goes through Triton into the model's code."""
    trace, span = _ask(server, "plain", traceparent=f"00-{'-'.join(_CLIENT)}-01")
    assert [trace] == traced.ends(_CLIENT[0])
    spans.wait(lambda all_: any(traced.ends(one.id) == [span] for one in all_))


def test_batch(server: Server, spans: Collector) -> None:
    """Three requests in one batch: one span, a child of one of them, that links to the others."""
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        for _ in range(3):
            client.async_infer(
                "together",
                _inputs(tritonclient.grpc),
                lambda result, error: answers.put((result, error)),
            )
        results = [answers.get(timeout=_SECONDS) for _ in range(3)]
    told = [result.as_numpy("y").ravel().tolist() for result, error in results if error is None]
    assert told == [told[0]] * 3
    trace, _ = told[0]
    came = spans.wait(
        lambda all_: (
            [one.name for one in all_].count("together") == 3 and "forward" in _whole(all_, trace)
        )
    )
    span = _whole(came, trace)["forward"]
    assert traced.ends(span.trace, span.id) == told[0]
    assert {span.parent, *span.links} == {one.id for one in came if one.name == "together"}
    assert len(span.links) == 2


def test_hooks(server: Server, spans: Collector) -> None:
    """Hooks of one request run in that one's context: Triton's own span is the current one."""
    trace, span = _ask(server, "hooked")
    came = spans.wait(lambda all_: "hooked" in _whole(all_, trace))
    assert traced.ends(_whole(came, trace)["hooked"].id) == [span]


def test_stream(server: Server, spans: Collector) -> None:
    """A stream's responses are all made in its span."""
    client = grpc_streams.connect(server)
    x = np.ones((1, 1), dtype=np.float32)
    came: list[Any] = list(grpc_streams.responses(client.ask("yields", {"x": x})))
    client.channel.close()
    told = [one["y"].ravel().tolist() for one in came]
    assert told == [told[0]] * 2
    trace, span = told[0]
    sent = spans.wait(lambda all_: {"stream", "yields"} <= _whole(all_, trace).keys())
    found = _whole(sent, trace)
    assert traced.ends(found["stream"].id) == [span]
    assert found["stream"].parent == found["yields"].id


def test_call_of_another_model(server: Server, spans: Collector) -> None:
    """What a model calls belongs to the same trace: its spans, and its code."""
    trace, span = _ask(server, "caller")
    came = spans.wait(
        lambda all_: (
            [one.name for one in all_ if traced.ends(one.trace) == [trace]].count("forward") == 2
        )
    )
    called = [one for one in came if traced.ends(one.id) == [span]]
    assert [one.attributes["triton.model_name"] for one in called] == ["plain"]


def test_tracing_without_opentelemetry(tmp_path: Path) -> None:
    """Triton's own traces, in files, have no context: nothing is current, and all is answered."""
    traced.TABLE["plain"].lay_out(tmp_path / "repository")
    arguments = [
        "--trace-config=rate=1",
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=triton,file={tmp_path}/trace.json",
    ]
    with serving.running(tmp_path, *arguments) as server:
        assert _ask(server, "plain") == [0, 0]
