"""Streams that clients leave, on a real server: cancelled calls, and unloads.

tritonserver 24.10 dies of a cancelled gRPC stream now and then, whatever the backend (see
docs/streaming.md): what cannot be told then is skipped.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
from collections.abc import Iterator
from http.client import HTTPException

import grpc
import grpc_streams
import pytest
import scenarios
import serving
import streamed
import tritonclient.grpc
from grpc_streams import Client, metric, responses
from scenarios import Scenario
from serving import until
from tritonclient.utils import InferenceServerException

from torch_py_backend.server import Server

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
_X = {"x": streamed.floats(1)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("leaving")
    for scenario in _MODELS:
        scenario.lay_out(folder / "repository")
    arguments = ("--model-control-mode=explicit", "--load-model=*")
    with serving.running(folder, *arguments) as server:
        yield server


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


def test_a_stream_that_waits_blocks_nobody_and_is_woken_if_cancelled(server: Server) -> None:
    with _asking(server) as client:
        slow = client.ask("asynchronous", {"count": streamed.ints(2), "pause": streamed.floats(60)})
        for _ in range(3):
            assert (
                len(list(responses(client.ask("asynchronous", {"count": streamed.ints(5)})))) == 5
            )
        assert slow.is_active()
        until(lambda: metric(server, "pytorch_py_live_streams", "asynchronous") == 1)
        slow.cancel()
        until(lambda: metric(server, "pytorch_py_live_streams", "asynchronous") == 0)


def test_unload_with_live_streams(server: Server) -> None:
    """An unload takes no new streams, and ends when the live ones have, cancelled or not."""
    with (
        _asking(server) as client,
        tritonclient.grpc.InferenceServerClient(server.grpc_address) as control,
    ):
        call = client.ask("endless", _X)
        next(responses(call))
        control.unload_model("endless")
        (refused,) = responses(client.ask("endless", _X))
        assert isinstance(refused, str)
        assert len(list(itertools.islice(responses(call), 50))) == 50
        call.cancel()
        until(lambda: _reason(control, "endless") == "unloaded")
        control.load_model("endless")
        call = client.ask("endless", _X)
        assert isinstance(next(responses(call)), dict)
        call.cancel()


def _reason(control: tritonclient.grpc.InferenceServerClient, name: str) -> str:
    (model,) = [
        entry for entry in control.get_model_repository_index().models if entry.name == name
    ]
    return str(model.reason)
