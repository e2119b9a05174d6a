"""Scenarios on a real tritonserver, over HTTP and gRPC in turn, and what /metrics tells of it."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

import monitoring
import numpy as np
import pytest
import serving as live
import tritonclient.grpc
from scenarios import Scenario
from serving import Serving
from tritonclient.utils import InferenceServerException

# Labels of what scrapes, not of what is scraped.
_OF_TARGETS = {"job", "instance", "namespace", "pod"}
_ROWS = [(one, ("http", "grpc")[place % 2]) for place, one in enumerate(live.TABLE)]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("serving")
    for scenario in live.TABLE:
        scenario.lay_out(folder / "repository")
    with live.asked(folder) as running:
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
        serving.check(protocol, scenario.name, call)
    for batch in scenario.batches:
        serving.check_together(scenario.name, batch)
    for part in scenario.logs:
        serving.until_logged(part)


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def _page(serving: Serving) -> str:
    address = f"http://{serving.server.metrics_address}/metrics"
    with urllib.request.urlopen(address, timeout=60) as answer:
        return str(answer.read().decode())


def _samples(page: str) -> list[Sample]:
    """Every sample, once."""
    samples = []
    for line in page.splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            assert match is not None, line
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            samples.append(Sample(match[1], labels, float(match[3])))
    keys = [(sample.name, *sorted(sample.labels.items())) for sample in samples]
    assert len(set(keys)) == len(keys)
    return samples


def test_what_is_scraped_has_the_names_labels_kinds_and_help_of_the_table(serving: Serving) -> None:
    page = _page(serving)
    seen = set()
    for sample in _samples(page):
        if sample.name.startswith("pytorch_py_"):
            row = monitoring.BY_NAME[sample.name]
            assert sample.labels.keys() == set(row.labels)
            kind = "counter" if row.grows else "gauge"
            assert f"# TYPE {sample.name} {kind}\n" in page
            assert f"# HELP {sample.name} {row.doc}\n" in page
            seen.add(sample.name)
    assert len(seen) > 6


def test_what_queries_of_deploy_ask_of_triton_s_own_metrics_is_there(serving: Serving) -> None:
    labels = {one.name: one.labels.keys() for one in _samples(_page(serving))}
    for place, query in monitoring.queries().items():
        for one in monitoring.selectors(query):
            name = str(one.name)
            if name.startswith("nv_"):
                asked = {matcher.name for matcher in one.matchers.matchers}
                assert asked - _OF_TARGETS <= set(labels[name]), place


def test_requests_are_counted_by_code_also_when_the_model_is_loaded_anew(serving: Serving) -> None:
    def counts() -> dict[str, float]:
        return {
            sample.labels["code"]: sample.value
            for sample in _samples(_page(serving))
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
    live.until(lambda: counts() == once)

    serving.grpc.load_model("poison")
    assert send(1.0) == "OK"
    twice = once | {"OK": once["OK"] + 1}
    live.until(lambda: counts() == twice)
