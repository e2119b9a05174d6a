"""Triton's /metrics, scraped: every request is in it once, and the sums are right."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import models
import monitoring
import numpy as np
import pytest
import scenarios
import serving
import tritonclient.grpc
from scenarios import Scenario
from tritonclient.utils import InferenceServerException

from torch_py_backend.server import Server

# Labels of what scrapes, not of what is scraped.
_OF_TARGETS = {"job", "instance", "namespace", "pod"}


_FILLED = Scenario(
    "filled", scenarios.python(models.Judge), scenarios.x_to_y(4, BATCH_BUCKETS="1,4,8")
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("metrics")
    _FILLED.lay_out(folder / "repository")
    arguments = ["--model-control-mode=explicit", "--load-model=*"]
    with serving.running(folder, *arguments) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    made = tritonclient.grpc.InferenceServerClient(server.grpc_address)
    yield made
    made.close()


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def page(server: Server) -> str:
    address = f"http://{server.metrics_address}/metrics"
    with urllib.request.urlopen(address, timeout=60) as answer:
        return str(answer.read().decode())


def scrape(server: Server) -> list[Sample]:
    """Every sample, once."""
    samples = []
    for line in page(server).splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            assert match is not None, line
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            samples.append(Sample(match[1], labels, float(match[3])))
    keys = [(sample.name, *sorted(sample.labels.items())) for sample in samples]
    assert len(set(keys)) == len(keys)
    return samples


def series(server: Server, model: str, name: str, label: str = "") -> dict[str, float]:
    """A model's series by one of its labels; what is 0 is left out."""
    return {
        sample.labels.get(label, ""): sample.value
        for sample in scrape(server)
        if sample.name == f"pytorch_py_{name}" and sample.labels["model"] == model and sample.value
    }


def send(client: Any, model: str, value: float) -> str:
    """One request; the name of gRPC's code."""
    inputs = {"x": np.full((1, 4), value, dtype=np.float32)}
    try:
        client.infer(model, serving.infer_inputs(tritonclient.grpc, inputs))
    except InferenceServerException as error:
        return str(error.status()).rpartition(".")[2]
    return "OK"


def test_what_is_scraped_has_the_names_labels_kinds_and_help_of_the_table(server: Server) -> None:
    text = page(server)
    seen = set()
    for sample in scrape(server):
        if sample.name.startswith("pytorch_py_"):
            row = monitoring.BY_NAME[sample.name]
            assert sample.labels.keys() == set(row.labels)
            kind = "counter" if row.grows else "gauge"
            assert f"# TYPE {sample.name} {kind}\n" in text
            assert f"# HELP {sample.name} {row.doc}\n" in text
            seen.add(sample.name)
    assert len(seen) > 6


def test_what_queries_of_deploy_ask_of_triton_s_own_metrics_is_there(server: Server) -> None:
    labels = {one.name: one.labels.keys() for one in scrape(server)}
    for place, query in monitoring.queries().items():
        for one in monitoring.selectors(query):
            name = str(one.name)
            if name.startswith("nv_"):
                asked = {matcher.name for matcher in one.matchers.matchers}
                assert asked - _OF_TARGETS <= set(labels[name]), place


def test_requests_are_counted_by_code_also_when_the_model_is_loaded_anew(
    server: Server, client: Any
) -> None:
    before = series(server, "filled", "requests_total", "code")
    codes = [send(client, "filled", value) for value in (1.0, -1.0, -5.0)]
    assert codes == ["OK", "INTERNAL", "UNAVAILABLE"]
    client.unload_model("filled")
    # The last request is counted, however soon it was followed by the end.
    once = {code: before.get(code, 0) + 1 for code in codes}
    serving.until(lambda: series(server, "filled", "requests_total", "code") == once)

    client.load_model("filled")
    assert send(client, "filled", 1.0) == "OK"
    twice = once | {"OK": once["OK"] + 1}
    serving.until(lambda: series(server, "filled", "requests_total", "code") == twice)
