"""Streams that clients leave, on a real server: cancelled calls, and unloads.

tritonserver 24.10 dies of a cancelled gRPC stream now and then, whatever the backend (see
docs/streaming.md): what cannot be told then is skipped.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import grpc
import grpc_streams
import pytest
import scenarios
import serving
import streamed
import tritonclient.grpc
from grpc_streams import Client, metric, responses
from scenarios import Scenario
from tritonclient.utils import InferenceServerException

from torch_py_backend.server import Server

_LONGEST_S = 60
_ENDLESS = """
import time


def forward(x):
    while True:
        time.sleep(0.002)
        yield x
"""
_CONFIG = streamed.config({"x": "FP32"}, {"y": "FP32"})
_MODELS = (
    Scenario("endless", scenarios.text(_ENDLESS), _CONFIG),
    *(one.scenario for one in streamed.TABLE if one.scenario.name == "asynchronous"),
)
_DIED = "tritonserver has died of a cancellation"
_X = {"x": streamed.floats(1)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("leaving")
    for scenario in _MODELS:
        scenario.lay_out(folder / "repository")
    arguments = ("--model-control-mode=explicit", "--load-model=*")
    with serving.running(folder, *arguments) as server:
        yield server


@pytest.fixture(autouse=True)
def alive(server: Server) -> None:
    """Skips what a server that has died cannot tell."""
    _skip_if_dead(server)


@contextlib.contextmanager
def _or_skipped(server: Server) -> Iterator[None]:
    """Skips what a server that dies meanwhile does not tell."""
    try:
        yield
    except (grpc.RpcError, InferenceServerException, StopIteration):
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(30)  # it may be dying just now
        _skip_if_dead(server)
        raise


def _skip_if_dead(server: Server) -> None:
    """Only a crash is Triton's fault: code of this backend runs in other processes."""
    code = server.process.poll()
    if code in (-signal.SIGSEGV, -signal.SIGABRT):
        pytest.skip(_DIED)
    assert code is None, f"tritonserver ended with {code}"


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    made = grpc_streams.connect(server)
    yield made
    made.channel.close()


def test_a_slow_stream_blocks_nobody(client: Client, server: Server) -> None:
    """While one stream waits for a minute, others begin and end."""
    with _or_skipped(server):
        slow = client.ask("asynchronous", {"count": streamed.ints(2), "pause": streamed.floats(60)})
        for _ in range(3):
            assert (
                len(list(responses(client.ask("asynchronous", {"count": streamed.ints(5)})))) == 5
            )
        assert slow.is_active()
        _until(server, lambda: metric(server, "pytorch_py_live_streams", "asynchronous") == 1)
        slow.cancel()
        # It is woken from its wait.
        _until(server, lambda: metric(server, "pytorch_py_live_streams", "asynchronous") == 0)


def test_unload_with_live_streams(client: Client, server: Server) -> None:
    """An unload takes no new streams, and ends when the live ones have, cancelled or not."""
    with _or_skipped(server):
        call = client.ask("endless", _X)
        next(responses(call))
        control = tritonclient.grpc.InferenceServerClient(server.grpc_address)
        control.unload_model("endless")
        (refused,) = responses(client.ask("endless", _X))
        assert isinstance(refused, str)
        assert len(list(itertools.islice(responses(call), 50))) == 50
        call.cancel()
        _until(server, lambda: _reason(control, "endless") == "unloaded")
        control.load_model("endless")
        call = client.ask("endless", _X)
        assert isinstance(next(responses(call)), dict)
        call.cancel()
        control.close()


def _reason(control: tritonclient.grpc.InferenceServerClient, name: str) -> str:
    (model,) = [
        entry for entry in control.get_model_repository_index().models if entry.name == name
    ]
    return str(model.reason)


def _until(server: Server, what: Callable[[], object]) -> None:
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):  # it does not answer
            if what():
                return
        _skip_if_dead(server)
        time.sleep(0.02)
    raise AssertionError
