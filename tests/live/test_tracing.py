"""Trace contexts on a real server: the model's code runs within Triton's span of its request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

import numpy as np
import pytest
import serving
import traced
import tritonclient.http

from torch_py_backend.server import Server

_CLIENT = ("12" * 16, "34" * 8)
# The names of Triton's spans by the ends of the IDs of their trace and of themselves.
Names: TypeAlias = dict[tuple[int, ...], str]


@pytest.fixture(scope="module")
def names() -> Names:
    return {}


@pytest.fixture(scope="module")
def collector(names: Names) -> Iterator[str]:
    """The address of a server that takes spans: OTLP in JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            scopes = [scope for one in body["resourceSpans"] for scope in one["scopeSpans"]]
            for span in (span for scope in scopes for span in scope["spans"]):
                names[tuple(traced.ends(span["traceId"], span["spanId"]))] = span["name"]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: str) -> Iterator[Server]:
    """A server that traces every request with OpenTelemetry."""
    folder = tmp_path_factory.mktemp("tracing")
    traced.TABLE["plain"].lay_out(folder / "repository")
    arguments = [
        "--trace-config=mode=opentelemetry",
        "--trace-config=rate=1",
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=opentelemetry,url={collector}",
        "--trace-config=opentelemetry,bsp_schedule_delay=100",
    ]
    with serving.running(folder, *arguments) as server:
        yield server


def test_the_trace_of_the_client_is_that_of_the_models_code(server: Server, names: Names) -> None:
    """It comes as W3C's header; the model runs in Triton's span of its request."""
    inputs = serving.infer_inputs(tritonclient.http, {"x": np.ones((1, 1), dtype=np.float32)})
    headers = {"traceparent": f"00-{'-'.join(_CLIENT)}-01"}
    with tritonclient.http.InferenceServerClient(server.http_address) as client:
        ids = client.infer("plain", inputs, headers=headers).as_numpy("y").ravel().tolist()
    assert ids[:1] == traced.ends(_CLIENT[0])
    serving.until(lambda: tuple(ids) in names)
    assert names[tuple(ids)] == "plain"
