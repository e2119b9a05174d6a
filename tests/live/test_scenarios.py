"""Models on a real tritonserver, over HTTP and gRPC in turn, and what /metrics tells of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

import composed
import models
import monitoring
import numpy as np
import pytest
import refused_configs
import repositories
import scenarios
import serving as live
import traced
import tritonclient.grpc
import tritonclient.http
from children import until
from scenarios import Scenario
from serving import Serving
from tritonclient.utils import InferenceServerException

_TABLE = (*live.TABLE, *repositories.TABLE, *composed.TABLE)
_ROWS = [(one, ("http", "grpc")[place % 2]) for place, one in enumerate(_TABLE)]
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
def serving(tmp_path_factory: pytest.TempPathFactory, collector: str) -> Iterator[Serving]:
    """A server that traces every request with OpenTelemetry.

    It has our backend under both names; LibTorch's is not there.
    """
    folder = tmp_path_factory.mktemp("serving")
    for scenario in (*_TABLE, traced.TABLE["plain"]):
        scenario.lay_out(folder / "repository")
    for name, (text, _) in refused_configs.TABLE.items():
        Scenario(name, scenarios.python(models.Negate), text).lay_out(folder / "repository")
    tracing = [
        "--trace-config=mode=opentelemetry",
        "--trace-config=rate=1",
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=opentelemetry,url={collector}",
        "--trace-config=opentelemetry,bsp_schedule_delay=100",
    ]
    with pytest.MonkeyPatch.context() as patch:
        # Some configs leave the device to Triton; a GPU would round differently.
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with live.asked(folder, *tracing) as running:
            yield running


@pytest.mark.parametrize(
    ("scenario", "protocol"), _ROWS, ids=lambda one: getattr(one, "name", None)
)
def test_scenario(scenario: Scenario, protocol: str, serving: Serving) -> None:
    """What the table says happens, through a server and a client; a refused model says why."""
    state = serving.states[scenario.name]
    assert state.ready is not bool(scenario.load_error), state.reason
    _, *says = scenario.load_error or ("",)  # the name is not repeated in the reason
    assert all(part in state.reason for part in says), state.reason
    for call in scenario.calls:
        live.check(getattr(serving, protocol), scenario.name, call)
    for batch in scenario.batches:
        live.check_together(serving.grpc, scenario.name, batch)
    # Written after the answers.
    until(lambda: all(part in serving.log for part in scenario.logs))


@pytest.mark.parametrize("name", ["resnet50", "python_runtime"])
def test_a_config_without_our_name_reaches_this_backend(name: str, serving: Serving) -> None:
    assert serving.http.get_model_config(name)["backend"] == "pytorch"


def test_configs_that_check_refuses_are_refused(serving: Serving) -> None:
    """tests/cli/test_check.py compares what `check` says of them, and of a valid one."""
    ready = {name for name, state in serving.states.items() if state.ready}
    assert not ready & refused_configs.TABLE.keys()


def test_the_trace_of_the_client_is_that_of_the_models_code(serving: Serving, names: Names) -> None:
    """It comes as W3C's header; the model runs in Triton's span of its request."""
    inputs = live.infer_inputs(tritonclient.http, {"x": np.ones((1, 1), dtype=np.float32)})
    headers = {"traceparent": f"00-{'-'.join(_CLIENT)}-01"}
    ids = serving.http.infer("plain", inputs, headers=headers).as_numpy("y").ravel().tolist()
    assert ids[:1] == traced.ends(_CLIENT[0])
    until(lambda: tuple(ids) in names)
    assert names[tuple(ids)] == "plain"


def test_what_is_scraped_has_the_names_labels_kinds_and_help_of_the_table(serving: Serving) -> None:
    page = serving.metrics
    seen = set()
    for sample in live.samples(page):
        if sample.name.startswith("pytorch_py_"):
            row = monitoring.BY_NAME[sample.name]
            assert sample.labels.keys() == set(row.labels)
            kind = "counter" if row.grows else "gauge"
            assert f"# TYPE {sample.name} {kind}\n" in page
            assert f"# HELP {sample.name} {row.doc}\n" in page
            seen.add(sample.name)
    assert len(seen) > 6


def test_what_queries_of_deploy_ask_of_triton_s_own_metrics_is_there(serving: Serving) -> None:
    labels = {one.name: one.labels.keys() for one in live.samples(serving.metrics)}
    for place, query in monitoring.queries().items():
        for one in monitoring.selectors(query):
            name = str(one.name)
            if name.startswith("nv_"):
                asked = {matcher.name for matcher in one.matchers.matchers}
                assert asked - monitoring.OF_TARGETS <= set(labels[name]), place


def test_requests_are_counted_by_code_also_when_the_model_is_loaded_anew(serving: Serving) -> None:
    def counts() -> dict[str, float]:
        return {
            sample.labels["code"]: sample.value
            for sample in live.samples(serving.metrics)
            if sample.name == "pytorch_py_requests_total"
            and sample.labels["model"] == "poison"
            and sample.value
        }

    def send(value: float) -> str:
        inputs = {"x": np.full((1, 4), value, dtype=np.float32)}
        try:
            serving.grpc.infer("poison", live.infer_inputs(tritonclient.grpc, inputs))
        except InferenceServerException as error:
            return str(error.status()).rpartition(".")[2]
        return "OK"

    before = counts()
    codes = [send(value) for value in (1.0, -1.0, -5.0)]
    assert codes == ["OK", "INTERNAL", "UNAVAILABLE"]
    serving.grpc.unload_model("poison")
    # The last request is counted, however soon it was followed by the end.
    once = {**before, **{code: before.get(code, 0) + 1 for code in codes}}
    until(lambda: counts() == once)

    serving.grpc.load_model("poison")
    assert send(1.0) == "OK"
    twice = once | {"OK": once["OK"] + 1}
    until(lambda: counts() == twice)
