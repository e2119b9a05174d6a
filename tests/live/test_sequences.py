"""Sequences on a real server: both strategies, two instances, many at once, and those that idle."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import models
import numpy as np
import pytest
import scenarios
import serving
import tritonclient.grpc

from torch_py_backend.server import Server

# The answers of a stream come in the order of its requests: none may wait for another's end, so
# there are no more sequences than slots.
_SEQUENCES = {"direct": 16, "oldest": 48}
_STEPS = 12
_TWO = "instance_group [{ kind: KIND_CPU count: 2 }]\n"
# A machine that does several things at once may keep a step waiting for seconds.
_PATIENT = "max_sequence_idle_microseconds: 60000000"


def _model(name: str, strategy: str) -> scenarios.Scenario:
    sequencing = scenarios.sequencing(scenarios.state(), strategy=strategy)
    text = scenarios.config({"x": [4]}, {"y": [4]}, more=sequencing + _TWO)
    return scenarios.Scenario(name, scenarios.python(models.Accumulate), text)


_OLDEST = "oldest { max_candidate_sequences: 64 max_queue_delay_microseconds: 1000 }"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sequences")
    _model("direct", f"direct {{ }} {_PATIENT}").lay_out(folder / "repository")
    _model("oldest", f"{_OLDEST} {_PATIENT}").lay_out(folder / "repository")
    with serving.running(folder) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        yield client


def _inputs(value: float) -> list[Any]:
    x = np.full((1, 4), value, dtype=np.float32)
    return serving.infer_inputs(tritonclient.grpc, {"x": x})


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_many_sequences_at_once(model: str, client: Any) -> None:
    """Numbers and texts are ids, steps of all are mixed, and each sequence has its own totals."""
    numbers = range(1, _SEQUENCES[model] + 1)
    names = [number if number % 2 else f"sequence {number}" for number in numbers]
    values = np.random.default_rng(0).integers(0, 1000, (len(names), _STEPS))
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))

    def send(place: int, number: int) -> None:
        client.async_stream_infer(
            model,
            _inputs(values[place, number]),
            request_id=f"{place}-{number}",
            sequence_id=names[place],
            sequence_start=number == 0,
            sequence_end=number == _STEPS - 1,
        )

    for place in range(len(names)):
        send(place, 0)
    for _ in range(values.size):
        result, error = answers.get(timeout=60)
        assert error is None, error
        place, number = map(int, result.get_response().id.split("-"))
        assert result.as_numpy("y")[0].tolist() == [values[place, : number + 1].sum()] * 4
        if number + 1 < _STEPS:
            send(place, number + 1)
    client.stop_stream()
