"""Loads that hang, and ends: of `serve`, of tritonserver, and by SIGTERM, on real servers."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import living
import psutil
import pytest
import streamed
import tritonclient.grpc
from children import until
from grpc_streams import Client, responses
from scenarios import Scenario, text, x_to_y
from serving import EXIT
from supervised import Supervised, regions, serve
from tritonclient.utils import InferenceServerException

from torch_py_backend.processes.instance_status import InstanceState
from torch_py_backend.server import instances
from torch_py_backend.server import supervisor as supervisors
from torch_py_backend.server.instances import InstanceMonitor
from torch_py_backend.server.supervisor import Event, Supervisor
from torch_py_backend.server.tritonserver import Server

pytestmark = pytest.mark.slow

# Answers with -x after so many seconds as x has.
_MODULE = """
import os
import time
from torch import nn


class Served(nn.Module):
    def __init__(self):
        super().__init__()
        {built}

    def forward(self, x):
        time.sleep(float(x[0, 0]))
        return -x
"""
_HANGS = "time.sleep(1000)"
_STREAM = """
import time


def forward(x):
    while True:
        time.sleep({1: 0.005, 103: 1000}.get(int(x), 0.2))
        yield x
"""
_CONFIG = x_to_y(4, WARMUP="false")
_LIMIT = 'parameters { key: "EXECUTION_TIMEOUT_MS" value { string_value: "3000" } }\n'
_ENDLESS = Scenario(
    "endless", text(_STREAM), streamed.config({"x": "FP32"}, {"y": "FP32"}) + _LIMIT
)


def _lay_out(folder: Path, *names: str, built: str = "pass") -> None:
    for name in names:
        Scenario(name, text(_MODULE.format(built=built)), _CONFIG).lay_out(folder)


@contextlib.contextmanager
def _streaming(served: Supervised) -> Iterator[None]:
    """Meanwhile a stream is under way, slowly: an instance that sends does not see a server die."""
    with grpc.insecure_channel(served.grpc) as channel:
        stream = Client(channel).ask("endless", {"x": streamed.floats(2)})
        assert next(iter(responses(stream)))
        yield


def _check_streams(served: Supervised) -> None:
    """A step that takes longer than the limit costs the instance; a stream that does, does not."""
    with grpc.insecure_channel(served.grpc) as channel:
        client = Client(channel)

        def come(value: float, count: int) -> Any:
            stream = client.ask("endless", {"x": streamed.floats(value)})
            assert len(list(itertools.islice(responses(stream), count))) == count
            return stream

        healthy = come(1, 700)
        hangs = come(103, 0)
        served.until_told("serves again")
        assert "endless_0_0 hung: a call took longer than EXECUTION_TIMEOUT_MS" in served.text
        # Triton never ends the streams of a process that has died.
        for stream in (healthy, hangs):
            stream.cancel()
        come(2, 5).cancel()


def test_loads_that_take_too_long_and_a_stop_at_work(tmp_path: Path) -> None:
    """--load-timeout ends loads that hang, whoever requested them; what served before goes on.

    After SIGTERM, readiness ends first, and a request in flight gets its answer. A stream and a
    load that are under way hold nothing up; nothing is left.
    """
    _lay_out(tmp_path, "changed")
    _lay_out(tmp_path, "hangs", "unknown", built=_HANGS)
    _ENDLESS.lay_out(tmp_path)
    loaded = [f"--load-model={name}" for name in ("changed", "hangs", "endless")]
    with serve(tmp_path, "--load-timeout=45", "--restarts=0", triton=loaded) as served:
        served.until_told("READY   changed")
        _lay_out(tmp_path / "new", "changed", built=_HANGS)
        (tmp_path / "new/changed/1/model.py").replace(tmp_path / "changed/1/model.py")
        asking, refusals = _loading(served, "changed")
        served.wait_loaded()
        served.until_told("instance changed_0_0 took longer than 45 s (--load-timeout)")
        asking.join(120)
        assert len(refusals) == 1
        assert "changed_0_0' is not healthy" in refusals[0]
        assert served.infer("changed", 0.1) == pytest.approx([-0.1] * 4)
        assert served.ready("changed")
        assert "took longer than 45 s (--load-timeout)" in served.ask("/ready/hangs")[1]["reason"]
        assert served.stubs("hangs") == []

        loading, _ = _loading(served, "unknown")
        served.until(lambda: served.in_state("unknown", InstanceState.LOADING))
        with _streaming(served):
            _check_stop(served)
        loading.join(60)


def _check_stop(served: Supervised) -> None:
    family, prefix, answers = served.family(), served.prefix(), []
    asking = threading.Thread(target=lambda: answers.append(served.infer("changed", 3.0)))
    asking.start()
    served.until(lambda: served.in_state("changed", InstanceState.BUSY))
    assert served.ready("changed")
    served.process.send_signal(signal.SIGTERM)
    stopping = {"ready": False, "reason": "the server is being stopped"}
    served.until(lambda: served.ask("/ready/changed") == (503, stopping))
    asking.join(60)
    assert answers == [[-3.0] * 4]
    assert served.process.wait(60) == 0
    living.wait(family)
    assert regions(prefix) == []


def _loading(served: Supervised, name: str) -> tuple[threading.Thread, list[str]]:
    """A load through Triton's API, under way, and the refusal that it ends with."""
    port = re.search(r"--grpc-port=(\d+)", living.command(served.triton()))
    assert port
    address, refusals = f"127.0.0.1:{port[1]}", list[str]()

    def ask() -> None:
        with tritonclient.grpc.InferenceServerClient(address) as client:
            try:
                client.load_model(name)
            except InferenceServerException as refusal:
                refusals.append(refusal.message())

    asking = threading.Thread(target=ask)
    asking.start()
    return asking, refusals


@contextlib.contextmanager
def _held(prefix: str) -> Iterator[None]:
    """Others who start a server meanwhile find an owner, and remove nothing."""
    with Path(f"/dev/shm/{prefix}owner").open("rb") as file:
        # Granted when the owner dies.
        waiting = threading.Thread(target=fcntl.flock, args=(file, fcntl.LOCK_EX))
        waiting.start()
        yield
        waiting.join(60)
        assert not waiting.is_alive()


def test_serve_or_tritonserver_is_killed(tmp_path: Path) -> None:
    """Kill -9 of serve ends all processes; the next start removes the folder and the regions.

    The death of tritonserver ends its instances, at rest and at work, even while it is a zombie, as
    in a container without an init process. It ends `serve`, too, with an exit code:
    Kubernetes starts it again. With --restrict, too.
    """
    _lay_out(tmp_path, "hangs")
    config = tmp_path / "hangs" / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", "count: 2"))
    _ENDLESS.lay_out(tmp_path)
    with serve(tmp_path, triton=["--load-model=hangs"]) as served:
        served.wait_loaded()
        family, prefix, folder = served.family(), served.prefix(), Path(served.triton().cwd())
        _hang(served, 1)
        with _held(prefix):
            served.process.kill()
            served.process.wait()
            living.wait(family)
            assert regions(prefix)
    key = {"TORCH_PY_BACKEND_ADMIN_KEY": "a secret"}
    with serve(tmp_path, "--restrict=model-repository,health", **key) as served:
        served.wait_loaded()
        assert regions(prefix) == []
        assert not folder.exists()
        _check_streams(served)
        family, prefix = served.family(), served.prefix()
        triton = served.triton()
        _hang(served, 2)
        # Without a stream: an instance that sends a response just then waits for Triton for ever.
        serve_itself = psutil.Process(served.process.pid)
        serve_itself.suspend()
        triton.send_signal(signal.SIGSEGV)
        living.wait(family)
        serve_itself.resume()
        assert served.process.wait(60) == 1
        assert regions(prefix) == []
        served.until_told("tritonserver ended by SIGSEGV")


def _hang(served: Supervised, instances: int) -> None:
    """Let so many instances of a model work for long."""

    def ask() -> None:
        with contextlib.suppress(InferenceServerException):
            served.infer("hangs", 1000.0, seconds=1000)

    for _ in range(instances):
        threading.Thread(target=ask, daemon=True).start()
    served.until(lambda: len(served.in_state("hangs", InstanceState.BUSY)) == instances)


def test_a_load_that_triton_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stalls for seconds while it loads, so that Triton forgets it, is replaced."""
    # Here, nothing but Triton notices that the process was stopped.
    monkeypatch.setattr(instances, "_STOPPED_S", math.inf)
    monkeypatch.setattr(supervisors, "_TRITON_S", 2.0)
    # Only then: the process that completes the config has ended.
    built = f"open(f'{tmp_path}/{{os.getpid()}}.loading', 'x'); time.sleep(3)"
    _lay_out(tmp_path / "repository", "slow", built=built)
    events: list[Event] = []
    arguments, log = ("--model-control-mode=explicit", EXIT), tmp_path / "server.log"
    with Server(tmp_path / "repository", arguments=arguments, log=log) as server:
        server.wait_loaded()
        monitor = InstanceMonitor(server.status_folder)
        supervisor = Supervisor(server.client, monitor, events.append, 3, 200)

        def stepped(what: Callable[[], Any]) -> Any:
            supervisor.step()
            return what()

        supervisor.load(["slow"])
        (loading,) = until(lambda: stepped(lambda: [*tmp_path.glob("*.loading")]))
        process = psutil.Process(int(loading.stem))
        process.suspend()
        # Triton expects a sign of life each second.
        time.sleep(3)
        with contextlib.suppress(psutil.NoSuchProcess):  # Triton may have killed it already
            process.resume()
        until(lambda: stepped(lambda: len(events) > 1), lambda: str(events))
        assert not process.is_running()
    down, ready = events
    assert down.text.startswith("Triton did not accept it after its load")
    assert ready.kind == "READY"
