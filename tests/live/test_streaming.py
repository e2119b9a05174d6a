"""Streams and sequences on a real server, over gRPC: many at once, left, and unloaded.

tritonserver 24.10 dies of a cancelled gRPC stream now and then, whatever the backend (see
docs/streaming.md): what cannot be told then is skipped, and comes last.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import queue
import shutil
import signal
import subprocess
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import grpc
import grpc_streams
import models
import numpy as np
import pytest
import safetensors.torch
import scenarios
import serving
import streamed
import tritonclient.grpc
from children import until
from grpc_streams import Client, metric, responses
from instances import named
from streamed import Streamed
from tritonclient.utils import InferenceServerException

from torch_py_backend.server import Server

_MANY = 64
_STREAMS = tuple(one for one in streamed.TABLE if one.scenario.name != "plain")
_STEPS = 90
_EXAMPLES = Path(__file__).parents[2] / "examples"
# The answers of a stream come in the order of its requests: none may wait for another's end, so
# there are no more sequences than slots.
_SEQUENCES = {"direct": 8, "oldest": 48}
_TURNS = 12
_STRATEGIES = {
    "direct": "direct { }",
    "oldest": "oldest { max_candidate_sequences: 64 max_queue_delay_microseconds: 1000 }",
}
_INSTANCES = {"direct": 1, "oldest": 2}
# A machine that does several things at once may keep a step waiting for seconds.
_PATIENT = "max_sequence_idle_microseconds: 60000000"


def _accumulates(name: str) -> scenarios.Scenario:
    strategy = f"{_STRATEGIES[name]} {_PATIENT}"
    state = scenarios.state(initial="zero_data: true")
    sequencing = scenarios.sequencing(state, strategy=strategy)
    group = f"instance_group [{{ kind: KIND_CPU count: {_INSTANCES[name]} }}]\n"
    outputs: scenarios.Specs = {"y": [4], "sum": [4]}
    text = scenarios.config({"x": [4]}, outputs, more=sequencing + group)
    return scenarios.Scenario(name, scenarios.python(models.Accumulate), text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("streaming")
    for scenario in (*(one.scenario for one in _STREAMS), *map(_accumulates, _SEQUENCES)):
        scenario.lay_out(folder / "repository")
    shutil.copytree(_EXAMPLES / "model_repository" / "sonnets", folder / "repository" / "sonnets")
    with serving.running(folder) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    made = grpc_streams.connect(server)
    yield made
    made.channel.close()


@pytest.mark.parametrize("one", _STREAMS, ids=lambda one: one.scenario.name)
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
    until(lambda: metric(server, stepped, "continuous") >= before + _MANY * _STEPS)


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
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(_EXAMPLES)
    train_sonnets = importlib.import_module("train_sonnets")
    poet = train_sonnets.model_source().Poet().eval()
    poet.load_state_dict(safetensors.torch.load_file(train_sonnets.WEIGHTS))
    monkeypatch.setattr(poet, "begin", functools.partial(poet.begin, temperature=0.0))
    expected = train_sonnets.written(poet, "When I", 60)
    stream_sonnets = importlib.import_module("stream_sonnets")
    stream_sonnets.main("When I", length=60, temperature=0.0, address=server.grpc_address)
    assert capsys.readouterr().out == f"{expected}\n"


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


def test_sequences_that_fail_never_end_and_begin_in_their_midst(server: Server) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        for call in named("state_oldest").calls:
            serving.check(client, "oldest", call)


@contextlib.contextmanager
def _asking(server: Server) -> Iterator[Client]:
    """A client; what a server does not tell that has died, or dies meanwhile, is skipped."""
    _skip_if_dead(server)
    client = grpc_streams.connect(server)
    try:
        yield client
    except (grpc.RpcError, InferenceServerException, StopIteration, OSError, HTTPException):
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(30)  # it may be dying just now
        _skip_if_dead(server)
        raise
    finally:
        client.channel.close()


def _skip_if_dead(server: Server) -> None:
    """Only a crash is Triton's fault: code of this backend runs in other processes."""
    code = server.process.poll()
    if code in (-signal.SIGSEGV, -signal.SIGABRT):
        pytest.skip("tritonserver has died of a cancellation")
    assert code is None, f"tritonserver ended with {code}"


def _endless(pause: float) -> dict[str, Any]:
    return {"count": streamed.ints(2**30), "pause": streamed.floats(pause)}


def test_a_stream_that_waits_blocks_nobody_and_is_woken_if_cancelled(server: Server) -> None:
    with _asking(server) as client:
        slow = client.ask("asynchronous", _endless(60))
        for _ in range(3):
            call = client.ask("asynchronous", {"count": streamed.ints(5)})
            assert len(list(responses(call))) == 5
        assert slow.is_active()
        until(lambda: metric(server, "pytorch_py_live_streams", "asynchronous") == 1)
        slow.cancel()
        until(lambda: metric(server, "pytorch_py_live_streams", "asynchronous") == 0)


def test_unload_with_live_streams(server: Server) -> None:
    """An unload takes no new streams, and ends when the live ones have, cancelled or not."""
    asked = "asynchronous", _endless(0.002)
    with (
        _asking(server) as client,
        tritonclient.grpc.InferenceServerClient(server.grpc_address) as control,
    ):

        def reason() -> str:
            models = control.get_model_repository_index().models
            return next(str(one.reason) for one in models if one.name == "asynchronous")

        call = client.ask(*asked)
        next(responses(call))
        control.unload_model("asynchronous")
        (refused,) = responses(client.ask(*asked))
        assert isinstance(refused, str)
        assert len(list(itertools.islice(responses(call), 50))) == 50
        call.cancel()
        until(lambda: reason() == "unloaded")
        control.load_model("asynchronous")
        call = client.ask(*asked)
        assert isinstance(next(responses(call)), dict)
        call.cancel()
