"""`serve` keeps models serving: instances that die, hang or never start, on real servers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import living
import psutil
import pytest
import serving
import tritonclient.grpc
from scenarios import Scenario, text, x_to_y
from supervised import LONGEST_S, Steady, Supervised, regions, serve, until
from tritonclient.utils import InferenceServerException

from torch_py_backend.processes.instance_status import InstanceState
from torch_py_backend.server import instances
from torch_py_backend.server import supervisor as supervisors
from torch_py_backend.server.instances import InstanceMonitor
from torch_py_backend.server.supervisor import Event, Supervisor

pytestmark = pytest.mark.slow

_MODULE = """
import ctypes, os, time
import torch
from torch import Tensor, nn
from torch_py_backend.pipeline import failures

{imported}

def lost(device):
    raise RuntimeError("CUDA error: device-side assert triggered")


class Served(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spoilt = False
        {built}

    def forward(self, x: Tensor) -> Tensor:
        what = int(x[0, 0])
        if what == 101:
            os._exit(3)
        if what == 102:
            ctypes.string_at(0)
        while what == 103:
            pass
        if what == 104:
            time.sleep(5)
        self.spoilt |= what == 105
        if self.spoilt:
            failures.probe = lost
            lost(x.device)
        return -x
"""
_ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }]
ensemble_scheduling { step [{ model_name: "victim" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } }] }
"""
# Warm: the first call of a process may take as long as the limit on a busy machine.
_TWO_LIMITED = x_to_y(EXECUTION_TIMEOUT_MS="2000").replace("count: 1", "count: 2")


def _model(
    name: str, imported: str = "", built: str = "pass", config: str | None = None
) -> Scenario:
    code = _MODULE.format(imported=imported, built=built)
    return Scenario(name, text(code), x_to_y() if config is None else config)


_MODELS = (
    _model("steady"),
    _model("victim", config=x_to_y(WARMUP="false")),
    _model("limited", config=_TWO_LIMITED),
    _model("stays", config=x_to_y()),
    _model("changed", config=x_to_y() + "version_policy { all {} }\n"),
    _model("slow", built="time.sleep(3)"),
    _model("dies_in_init", built="os._exit(4)"),
    _model("refused", imported="raise ValueError('no luck')"),
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healing") / "repository"
    for one in _MODELS:
        one.lay_out(folder)
    (folder / "ensemble" / "1").mkdir(parents=True)
    (folder / "ensemble" / "config.pbtxt").write_text(_ENSEMBLE)
    return folder


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[Supervised]:
    """A server with models that fall, and some that never stand."""
    with serve(repository, "--restarts=6") as running:
        running.wait_loaded()
        yield running


@pytest.fixture(autouse=True)
def _log_of_this_test(request: pytest.FixtureRequest) -> None:
    """Let a test see only what is logged while it runs: the server is shared."""
    if "served" in request.fixturenames:
        request.getfixturevalue("served").skip_log()


@contextlib.contextmanager
def _undisturbed(served: Supervised) -> Iterator[None]:
    """Meanwhile another model answers every request."""
    steady = Steady(served, "steady")
    try:
        yield
    finally:
        steady.end()
    assert steady.failures == []
    assert steady.answers > 0


def _healed(served: Supervised, model: str, old: list[psutil.Process], says: str) -> None:
    """The model serves again, in another process, and the reason was told."""
    _until_told(served, says)
    until(lambda: served.ready(model), served)
    assert served.infer(model, 7.0) == [-7.0] * 4
    # One that did not die may still finish its work.
    until(lambda: not {*old} & {*served.stubs(model)}, served)


def _why(served: Supervised, model: str) -> str:
    """Why a model does not serve; empty where it does."""
    return str(served.ask("/ready")[1].get("models", {}).get(model, ""))


def _until_told(served: Supervised, says: str) -> None:
    until(lambda: says in served.text, served)


def _regions_of_the_living(served: Supervised) -> bool:
    """The shared memory of dead instances is gone: one region a process, and the owner's file."""
    instances = living.left(served.triton().children())
    return len(regions(served.prefix())) <= len(instances) + 1


def _kill(served: Supervised, old: list[psutil.Process]) -> None:
    for one in old:
        one.kill()


def _ask(value: float) -> Callable[[Supervised, list[psutil.Process]], None]:
    """A request with this value, which is refused."""

    def ask(served: Supervised, old: list[psutil.Process]) -> None:
        model = _MODEL_OF[value]
        with pytest.raises(InferenceServerException):
            served.infer(model, value)

    return ask


def _kill_in_forward(served: Supervised, old: list[psutil.Process]) -> None:
    asking = threading.Thread(target=_ask(104.0), args=(served, old))
    asking.start()
    until(lambda: served.in_state("victim", InstanceState.BUSY), served)
    _kill(served, old)
    asking.join(60)
    assert not asking.is_alive()


def _stop_under_load(served: Supervised, old: list[psutil.Process]) -> None:
    """SIGSTOP: it is replaced before it harms tritonserver."""
    load, triton = Steady(served, "victim"), served.triton()
    until(lambda: load.answers > 10, served)
    for one in old:
        one.suspend()
    until(lambda: not served.ready("victim"), served)
    load.end()
    assert load.failures
    assert served.triton() == triton


def _kill_while_it_heals(served: Supervised, old: list[psutil.Process]) -> None:
    _kill(served, old)
    _kill(served, until(lambda: served.in_state("slow", InstanceState.LOADING), served))


# The models that die of these values.
_MODEL_OF = {102.0: "victim", 103.0: "limited", 104.0: "victim", 105.0: "stays"}


@pytest.mark.parametrize(
    ("model", "fault", "says"),
    [
        ("victim", _kill, "DOWN    victim: instance victim_0_0 was ended by SIGKILL"),
        ("victim", _ask(102.0), "SIGSEGV"),
        ("victim", _kill_in_forward, "SIGKILL"),
        ("victim", _stop_under_load, "DOWN    victim: instance victim_0_0 was stopped for 2 s"),
        ("stays", _ask(105.0), "DOWN    stays: instance stays_0_0 cannot compute"),
        ("limited", _ask(103.0), "hung: a call took longer than EXECUTION_TIMEOUT_MS, 2000 ms"),
        ("slow", _kill_while_it_heals, "(attempt 2 of 6)"),
    ],
    ids=[
        "killed", "segfault", "killed in forward", "stopped under load", "poisoned", "hangs",
        "killed in its load",
    ],
)  # fmt: skip
def test_an_instance_that_fails(
    model: str,
    fault: Callable[[Supervised, list[psutil.Process]], None],
    says: str,
    served: Supervised,
) -> None:
    """Its model is not ready, and then serves again; another model answers every request."""
    until(lambda: served.ready(model), served)
    old = served.stubs(model)
    assert len(old) == (2 if model == "limited" else 1)
    with _undisturbed(served):
        fault(served, old)
        _healed(served, model, old, says)
    until(lambda: _regions_of_the_living(served), served)
    if says == "SIGSEGV":
        assert "in forward" in served.log.partition("Fatal Python error: Segmentation fault")[2]


def test_two_deaths_at_once(served: Supervised) -> None:
    """Both models serve again; an ensemble is not ready without its part, and then with it."""
    until(lambda: served.ready("ensemble") and served.ready("stays"), served)
    _kill(served, [*served.stubs("victim"), *served.stubs("stays")])
    until(lambda: "SIGKILL" in _why(served, "victim"), served)
    needs = "is down: needs the model 'victim', which does not serve"
    until(lambda: served.ask("/ready/ensemble")[1].get("reason") == needs, served)
    until(lambda: served.ready("ensemble"), served)
    assert served.infer("ensemble", 2.0) == [-2.0] * 4
    until(lambda: served.ready("stays"), served)


def test_a_server_that_does_not_answer(served: Supervised) -> None:
    """It is not live, and no model is taken for dead or unloaded."""
    until(lambda: served.ready("steady") and served.ready("victim"), served)
    served.skip_log()
    triton = served.triton()
    triton.suspend()
    try:
        dead = {"live": False, "reason": "tritonserver does not answer"}
        until(lambda: served.ask("/live") == (503, dead), served)
    finally:
        triton.resume()
    until(lambda: served.ask("/live") == (200, {"live": True}), served)
    assert served.infer("steady", 1.0) == [-1.0] * 4
    assert not re.search("^(DOWN|RELEASED) +(steady|victim)", served.text, re.MULTILINE)


def test_a_crash_loop_at_start_up(served: Supervised) -> None:
    """A model that never loads is given up, with the reason; the others serve all the while."""
    until(lambda: "GIVEN UP dies_in_init" in served.log, served)
    status, told = served.ask("/ready/dies_in_init")
    assert status == 503
    assert told["reason"].startswith("stays down: instance")
    # Of one death or another: how a process ended is lost where Triton looks first.
    lines = served.log.splitlines()
    assert any("dies_in_init" in line and "exit code 4" in line for line in lines)
    status, told = served.ask("/ready/refused")
    assert status == 503
    assert "ValueError: no luck" in told["reason"]
    assert "/repository" not in str(told)
    assert served.log.count("FAILED  refused") == 1
    assert served.ask("/live") == (200, {"live": True})


def _document(name: str) -> str:
    """A config for at most three rows, as load requests have it."""
    tensor = {"data_type": "TYPE_FP32", "dims": [4]}
    instances = [{"kind": "KIND_CPU", "count": 1}]
    document = {"name": name, "backend": "pytorch_py", "max_batch_size": 3}
    tensors = {"input": [{"name": "x", **tensor}], "output": [{"name": "y", **tensor}]}
    return json.dumps(document | tensors | {"instance_group": instances})


def test_loads_and_unloads_by_users(served: Supervised, repository: Path) -> None:
    """What a user unloads is not missed; what a user loads is healed with what it was loaded with.

    Its files are not known: it stays down, with the reason, until the next load.
    """
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        # A version that does not load: what served before goes on.
        (repository / "changed" / "2").mkdir()
        (repository / "changed" / "2" / "model.py").write_text("raise ValueError('no luck')\n")
        with pytest.raises(InferenceServerException, match="no luck"):
            client.load_model("changed")
        assert served.ready("changed")
        assert served.infer("changed", 7.0) == [-7.0] * 4
        shutil.rmtree(repository / "changed" / "2")
        _unload(client, served, "changed")

        client.load_model("changed", config=_document("changed"))
        until(lambda: served.ready("changed"), served)
        for attempt in "12":
            old = served.stubs("changed")
            _kill(served, old)
            _healed(served, "changed", old, f"(attempt {attempt} of 6)")
            assert client.get_model_config("changed").config.max_batch_size == 3

        files = {"file:1/model.py": _MODULE.format(imported="", built="pass").encode()}
        for dies in (True, False):
            client.load_model("uploaded", config=_document("uploaded"), files=files)
            until(lambda: served.ready("uploaded"), served)
            assert served.infer("uploaded", 7.0) == [-7.0] * 4
            if dies:
                _kill(served, served.in_state("uploaded", InstanceState.IDLE))
                _until_told(served, "GIVEN UP uploaded: instance uploaded_0_0 was ended by SIGKILL")
                assert "SIGKILL" in _why(served, "uploaded")
                until(lambda: not client.is_model_ready("uploaded"), served)
        _unload(client, served, "uploaded")


def _unload(client: Any, served: Supervised, model: str) -> None:
    client.unload_model(model)
    until(lambda: served.ask(f"/ready/{model}")[0] == 404, served)
    _until_told(served, f"RELEASED {model}")


def test_a_load_that_takes_too_long(tmp_path: Path) -> None:
    """--load-timeout ends loads that hang, whoever requested them, and says so; others serve."""
    names = ["steady", "changed", "endless"]
    for name in (*names, "unknown"):
        built = "pass" if name in ("steady", "changed") else "time.sleep(1000)"
        _model(name, built=built).lay_out(tmp_path)
    loaded = [f"--load-model={name}" for name in names]
    with serve(tmp_path, "--load-timeout=45", "--restarts=0", triton=loaded) as served:
        until(lambda: "READY   steady" in served.text, served)
        until(lambda: "READY   changed" in served.text, served)
        _model("changed", built="time.sleep(1000)").lay_out(tmp_path / "new")
        (tmp_path / "new/changed/1/model.py").replace(tmp_path / "changed/1/model.py")
        loads = {name: _loading(served, name) for name in ("unknown", "changed")}
        served.wait_loaded()
        for name, (asking, refusals) in loads.items():
            _until_told(served, f"instance {name}_0_0 took longer than 45 s (--load-timeout)")
            asking.join(120)
            assert len(refusals) == 1
            assert f"{name}_0_0' is not healthy" in refusals[0]
        assert served.infer("steady", 1.0) == [-1.0] * 4
        assert served.infer("changed", 1.0) == [-1.0] * 4
        assert served.ready("changed")
        assert "took longer than 45 s (--load-timeout)" in served.ask("/ready/endless")[1]["reason"]
        assert served.stubs("endless") == []


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

    The death of tritonserver ends `serve`, with the signal's exit code: Kubernetes starts it again.
    With --restrict, too.
    """
    _model("steady").lay_out(tmp_path)
    _model("hangs", config=x_to_y(WARMUP="false")).lay_out(tmp_path)
    with serve(tmp_path) as served:
        served.wait_loaded()
        family, prefix, folder = served.family(), served.prefix(), Path(served.triton().cwd())
        with contextlib.suppress(InferenceServerException):
            served.infer("hangs", 103.0, seconds=1.0)
        with _held(prefix):
            served.process.kill()
            served.process.wait()
            assert living.all_end(family)
            assert regions(prefix)
    key = {"TORCH_PY_BACKEND_ADMIN_KEY": "a secret"}
    restricted = "--restrict=model-repository,health"
    with serve(tmp_path, restricted, triton=["--load-model=steady"], **key) as served:
        served.wait_loaded()
        assert regions(prefix) == []
        assert not folder.exists()
        _check_restrictions(served)
        family, prefix = served.family(), served.prefix()
        served.triton().send_signal(signal.SIGSEGV)
        assert served.process.wait(60) == 128 + signal.SIGSEGV
        assert living.all_end(family)
        assert regions(prefix) == []
        until(lambda: "tritonserver ended by SIGSEGV" in served.text, served)


def _check_restrictions(served: Supervised) -> None:
    """Clients without the key are refused; serve itself has it, and no other process."""
    assert served.infer("steady", 1.0) == [-1.0] * 4
    assert served.ask("/live")[0] == 200
    for one in served.family():
        assert "a secret" not in one.environ().values(), living.command(one)
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.unload_model("steady")
        client.unload_model("steady", headers={"triton-grpc-protocol-admin-key": "a secret"})
    until(lambda: served.ask("/ready/steady")[0] == 404, served)


def test_sigterm_under_load(tmp_path: Path) -> None:
    """Readiness ends first; the request in flight gets its answer; nothing is left."""
    _model("steady", config=x_to_y(WARMUP="false")).lay_out(tmp_path)
    with serve(tmp_path, triton=["--exit-timeout-secs=30"]) as served:
        served.wait_loaded()
        family, prefix, answers = served.family(), served.prefix(), []
        asking = threading.Thread(target=lambda: answers.append(served.infer("steady", 104.0)))
        asking.start()
        until(lambda: served.in_state("steady", InstanceState.BUSY), served)
        assert served.ask("/ready") == (200, {"ready": True})
        served.process.send_signal(signal.SIGTERM)
        until(lambda: served.ask("/ready")[0] == 503, served)
        assert served.ask("/ready")[1]["reason"] == "the server is being stopped"
        asking.join(60)
        assert answers == [[-104.0] * 4]
        assert served.process.wait(60) == 0
        assert living.all_end(family)
        assert regions(prefix) == []


def test_a_load_that_triton_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stalls for seconds while it loads, so that Triton forgets it, is replaced."""
    # Here, nothing but Triton notices that the process was stopped.
    monkeypatch.setattr(instances, "_STOPPED_S", math.inf)
    monkeypatch.setattr(supervisors, "_ACCEPTED_S", 2.0)
    # Only then: the process that completes the config has ended.
    built = f"open(f'{tmp_path}/{{os.getpid()}}.loading', 'x'); time.sleep(3)"
    _model("slow", built=built).lay_out(tmp_path / "repository")
    events: list[Event] = []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving.running(tmp_path, "--model-control-mode=explicit"))
        monitor = InstanceMonitor(server.status_folder)
        supervisor = Supervisor(server.client, monitor, events.append, restarts=3, load_seconds=200)

        def step_until(what: Callable[[], bool]) -> None:
            deadline = time.monotonic() + LONGEST_S
            while not what():
                assert time.monotonic() < deadline, events
                time.sleep(0.1)
                supervisor.step()

        supervisor.load(["slow"])
        step_until(lambda: any(tmp_path.glob("*.loading")))
        process = psutil.Process(int(next(tmp_path.glob("*.loading")).stem))
        process.suspend()
        # Triton expects a sign of life each second.
        time.sleep(3)
        with contextlib.suppress(psutil.NoSuchProcess):  # Triton may have killed it already
            process.resume()
        step_until(lambda: len(events) > 1)
        assert not process.is_running()
    down, ready = events
    assert down.text.startswith("Triton did not accept it after its load")
    assert ready.kind == "READY"
