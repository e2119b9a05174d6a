"""Streams and sequences on a real server, over gRPC: many at once."""

from __future__ import annotations

import functools
import importlib
import queue
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc_streams
import models
import numpy as np
import pytest
import safetensors.torch
import scenarios
import serving
import streamed
import tritonclient.grpc
from grpc_streams import Client, metric, responses
from streamed import Streamed

from torch_py_backend.server import Server

_MANY = 64
_STEPS = 90
_LONGEST_S = 60
_MODELS = tuple(one.scenario for one in streamed.TABLE)
_EXAMPLES = Path(__file__).parents[2] / "examples"
# The answers of a stream come in the order of its requests: none may wait for another's end, so
# there are no more sequences than slots.
_SEQUENCES = {"direct": 16, "oldest": 48}
_TURNS = 12
_STRATEGIES = {
    "direct": "direct { }",
    "oldest": "oldest { max_candidate_sequences: 64 max_queue_delay_microseconds: 1000 }",
}
_TWO = "instance_group [{ kind: KIND_CPU count: 2 }]\n"
# A machine that does several things at once may keep a step waiting for seconds.
_PATIENT = "max_sequence_idle_microseconds: 60000000"


def _accumulates(name: str) -> scenarios.Scenario:
    strategy = f"{_STRATEGIES[name]} {_PATIENT}"
    sequencing = scenarios.sequencing(scenarios.state(), strategy=strategy)
    text = scenarios.config({"x": [4]}, {"y": [4]}, more=sequencing + _TWO)
    return scenarios.Scenario(name, scenarios.python(models.Accumulate), text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("streaming")
    for scenario in (*_MODELS, *map(_accumulates, _SEQUENCES)):
        scenario.lay_out(folder / "repository")
    shutil.copytree(_EXAMPLES / "model_repository" / "sonnets", folder / "repository" / "sonnets")
    with serving.running(folder) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    made = grpc_streams.connect(server)
    yield made
    made.channel.close()


@pytest.mark.parametrize("one", streamed.TABLE, ids=lambda one: one.scenario.name)
def test_the_table_of_streams(one: Streamed, client: Client) -> None:
    for stream in one.streams:
        grpc_streams.check(client, one.scenario.name, stream)


def test_each_of_many_generators_has_its_own_values_in_their_order(client: Client) -> None:
    calls = [
        client.ask(
            "rows",
            {
                "x": streamed.floats(number, -number)[:, None],
                "count": streamed.ints(20, 20)[:, None],
            },
        )
        for number in range(_MANY)
    ]
    for number, call in enumerate(calls):
        came = [one["y"][:, 0].tolist() for one in responses(call) if isinstance(one, dict)]
        assert came == [[factor * number, -factor * number] for factor in range(1, 21)]


def test_many_streams_that_share_their_steps_have_their_values_in_order_and_are_counted(
    client: Client, server: Server
) -> None:
    stepped = "pytorch_py_stepped_streams_total"
    before = metric(server, stepped, "continuous")
    starts = [number / _MANY for number in range(_MANY)]
    calls = [
        client.ask("continuous", {"start": streamed.floats(start), "count": streamed.ints(_STEPS)})
        for start in starts
    ]
    for start, call in zip(starts, calls, strict=True):
        came = [float(one["y"][0]) for one in responses(call) if isinstance(one, dict)]
        assert came == [start + tick for tick in range(_STEPS)]
    serving.until(lambda: metric(server, stepped, "continuous") >= before + _MANY * _STEPS)


def test_the_last_response_is_marked(client: Client) -> None:
    """Who asks for it gets an empty last response; a stream that knows its last marks that."""
    asked = {"triton_enable_empty_final_response": True}
    ends = []
    for name, inputs in (
        ("ticker", {"count": streamed.ints(2)}),
        ("continuous", {"start": streamed.floats(1), "count": streamed.ints(2)}),
    ):
        messages = list(client.ask(name, inputs, **asked))
        final = [
            one.infer_response.parameters["triton_final_response"].bool_param for one in messages
        ]
        assert final == [False] * (len(final) - 1) + [True]
        ends.append(len(messages))
    assert ends == [3, 2]


def test_the_client_of_the_example_prints_what_its_network_writes_without_a_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(_EXAMPLES)
    train_sonnets = importlib.import_module("train_sonnets")
    poet = train_sonnets.model_source().Poet().eval()
    poet.load_state_dict(safetensors.torch.load_file(train_sonnets.WEIGHTS))
    monkeypatch.setattr(poet, "begin", functools.partial(poet.begin, temperature=0.0))
    expected = train_sonnets.written(poet, "When I", 60)
    command = [str(_EXAMPLES / "stream_sonnets.py"), "When I", "--length=60", "--temperature=0"]
    done = subprocess.run(
        [sys.executable, *command, f"--address={server.grpc_address}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=_LONGEST_S,
    )
    assert done.stdout == f"{expected}\n"


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_many_sequences_at_once(model: str, server: Server) -> None:
    """Numbers and texts are ids, steps of all are mixed, and each sequence has its own totals."""
    numbers = range(1, _SEQUENCES[model] + 1)
    names = [number if number % 2 else f"sequence {number}" for number in numbers]
    values = np.random.default_rng(0).integers(0, 1000, (len(names), _TURNS)).astype(np.float32)
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = tritonclient.grpc.InferenceServerClient(server.grpc_address)
    client.start_stream(lambda result, error: answers.put((result, error)))

    def send(place: int, number: int) -> None:
        client.async_stream_infer(
            model,
            serving.infer_inputs(tritonclient.grpc, {"x": values[place, number].repeat(4)[None]}),
            request_id=f"{place}-{number}",
            sequence_id=names[place],
            sequence_start=number == 0,
            sequence_end=number == _TURNS - 1,
        )

    for place in range(len(names)):
        send(place, 0)
    for _ in range(values.size):
        result, error = answers.get(timeout=60)
        assert error is None, error
        place, number = map(int, result.get_response().id.split("-"))
        assert result.as_numpy("y")[0].tolist() == [values[place, : number + 1].sum()] * 4
        if number < _TURNS - 1:
            send(place, number + 1)
    client.close()
