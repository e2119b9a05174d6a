"""Trace contexts on a real server: the model's code runs within Triton's span of its request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc_streams
import numpy as np
import pytest
import serving
import traced
import tritonclient.http
from traced import Collector, Span

from torch_py_backend.server import Server

_MODELS = ("plain", "yields", "caller")
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
    with serving.running(folder, *arguments) as server:
        yield server


def _ask(server: Server, name: str, **headers: str) -> list[int]:
    x = np.ones((1, 1), dtype=np.float32)
    inputs = serving.infer_inputs(tritonclient.http, {"x": x})
    with tritonclient.http.InferenceServerClient(server.http_address) as client:
        result = client.infer(name, inputs, headers=headers)
        told: list[int] = result.as_numpy("y").ravel().tolist()
        return told


def _span_name(collector: Collector, ids: list[int]) -> str:
    """Return the name of Triton's span with the ends of these IDs."""

    def matches(span: Span) -> bool:
        return traced.ends(span.trace, span.id) == ids

    sent = collector.wait(lambda all_: any(map(matches, all_)))
    return next(filter(matches, sent)).name


def test_trace_of_the_client(server: Server, collector: Collector) -> None:
    """A client's own trace, sent as W3C's header, goes through Triton into the model's code."""
    ids = _ask(server, "plain", traceparent=f"00-{'-'.join(_CLIENT)}-01")
    assert ids[:1] == traced.ends(_CLIENT[0])
    assert _span_name(collector, ids) == "plain"


def test_stream(server: Server, collector: Collector) -> None:
    """Each response of a stream is made within Triton's span of its request."""
    client = grpc_streams.connect(server)
    x = np.ones((1, 1), dtype=np.float32)
    responses: list[Any] = list(grpc_streams.responses(client.ask("yields", {"x": x})))
    client.channel.close()
    first, second = (response["y"].ravel().tolist() for response in responses)
    assert first == second
    assert _span_name(collector, first) == "yields"


def test_call_of_another_model(server: Server, collector: Collector) -> None:
    """A called model runs within the same trace, in Triton's span of its own request."""
    ids = _ask(server, "caller", traceparent=f"00-{'-'.join(_CLIENT)}-01")
    assert ids[:1] == traced.ends(_CLIENT[0])
    assert _span_name(collector, ids) == "plain"
