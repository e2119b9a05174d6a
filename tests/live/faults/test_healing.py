"""`serve` keeps models serving: instances that die, hang or never start, on one real server."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import living
import psutil
import pytest
import tritonclient.grpc
from scenarios import Scenario, text, x_to_y
from supervised import Supervised, regions, serve
from tritonclient.utils import InferenceServerException

from torch_py_backend.config import pbtxt
from torch_py_backend.processes.instance_status import InstanceState

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
            ctypes.PyDLL(None).sleep(8)
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


def _model(name: str, config: str = x_to_y(), imported: str = "", built: str = "pass") -> Scenario:
    return Scenario(name, text(_MODULE.format(imported=imported, built=built)), config)


_MODELS = (
    _model("steady"),
    _model("victim", x_to_y(WARMUP="false")),
    # Warm: the first call of a process may take as long as the limit on a busy machine.
    _model("limited", x_to_y(EXECUTION_TIMEOUT_MS="2000")),
    _model("changed", x_to_y() + "version_policy { all {} }\n"),
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
    with serve(repository, "--restarts=3") as running:
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
    with served.load("steady") as load:
        yield
    assert load.failures == []
    assert load.answers() == {(-3.0,) * 4}


def _answers(served: Supervised, model: str) -> bool:
    return served.infer(model, 7.0) == [-7.0] * 4


def _healed(served: Supervised, model: str, old: list[psutil.Process], says: str) -> None:
    """The model serves again, in another process, and the reason was told."""
    served.until_told(says)
    served.until(lambda: served.ready(model))
    assert _answers(served, model)
    # One that did not die may still finish its work.
    served.until(lambda: not {*old} & {*served.stubs(model)})


def _why(served: Supervised, model: str) -> str:
    """Why a model does not serve; empty where it does."""
    return str(served.ask("/ready")[1].get("models", {}).get(model, ""))


def _regions_of_the_living(served: Supervised) -> bool:
    """The shared memory of dead instances is gone: one region a process, and the owner's file."""
    instances = living.left(served.triton().children())
    return len(regions(served.prefix())) <= len(instances) + 1


def _kill(processes: list[psutil.Process]) -> None:
    for one in processes:
        one.kill()


def _ask(value: float, says: str | None = None) -> Callable[[Supervised, str], None]:
    """A request with this value, which is refused."""

    def ask(served: Supervised, model: str) -> None:
        with pytest.raises(InferenceServerException, match=says):
            served.infer(model, value)

    return ask


def _stop_under_load(served: Supervised, model: str) -> None:
    """SIGSTOP: it is replaced before it harms tritonserver."""
    triton = served.triton()
    with served.load(model) as load:
        load.go_on(10)
        for one in served.stubs(model):
            one.suspend()
        served.until(lambda: not served.ready(model))
    assert load.failures
    assert served.triton() == triton


def _kill_while_it_heals(served: Supervised, model: str) -> None:
    _kill(served.stubs(model))
    _kill(served.until(lambda: served.in_state(model, InstanceState.LOADING)))


@pytest.mark.parametrize(
    ("model", "fault", "says"),
    [
        ("victim", _ask(102.0), "SIGSEGV"),
        ("changed", _stop_under_load, "changed: instance changed_0_0 was stopped for 2 s"),
        ("changed", _ask(105.0, "met a fatal error"), "changed_0_0 cannot compute"),
        ("limited", _kill_while_it_heals, "(attempt 2 of 3)"),
        ("limited", _ask(103.0), "hung: a call took longer than EXECUTION_TIMEOUT_MS, 2000 ms"),
    ],
    ids=[
        "segfault", "stopped under load", "poisoned", "killed in its load", "hangs",
    ],
)  # fmt: skip
def test_an_instance_that_fails_is_replaced(
    model: str, fault: Callable[[Supervised, str], None], says: str, served: Supervised
) -> None:
    """Its model is not ready, and then serves again; another model answers every request."""
    served.until(lambda: served.ready(model))
    old = served.stubs(model)
    assert len(old) == 1
    with _undisturbed(served):
        fault(served, model)
        _healed(served, model, old, says)
    served.until(lambda: _regions_of_the_living(served))
    if says == "SIGSEGV":
        assert "in forward" in served.log.partition("Fatal Python error: Segmentation fault")[2]


def test_two_deaths_at_once_and_a_server_that_does_not_answer(served: Supervised) -> None:
    """Both models serve again; an ensemble is not ready without its part, and then with it.

    A server that does not answer is not live, and no model of it is taken for dead or unloaded.
    """
    served.until(lambda: served.ready("ensemble") and served.ready("changed"))
    old = served.stubs("victim"), served.stubs("changed")
    _kill([*old[0], *old[1]])
    served.until(lambda: "SIGKILL" in _why(served, "victim"))
    needs = "is down: needs the model 'victim', which does not serve"
    served.until(lambda: served.ask("/ready/ensemble")[1].get("reason") == needs)
    served.until(lambda: served.ready("ensemble"))
    assert _answers(served, "ensemble")
    for model, processes in zip(("victim", "changed"), old, strict=True):
        _healed(served, model, processes, f"{model}_0_0 was ended by SIGKILL")

    served.skip_log()
    triton = served.triton()
    triton.suspend()
    try:
        dead = {"live": False, "reason": "tritonserver does not answer"}
        served.until(lambda: served.ask("/live") == (503, dead))
    finally:
        triton.resume()
    served.until(lambda: served.ask("/live") == (200, {"live": True}))
    assert _answers(served, "steady")
    assert not re.search("^(DOWN|RELEASED) +(steady|victim)", served.text, re.MULTILINE)


def test_a_call_that_holds_the_gil_for_seconds_is_no_hang(served: Supervised) -> None:
    """As a compiled package does; longer than Triton waits for a process that was stopped."""
    old = served.stubs("changed")
    with _undisturbed(served):
        assert served.infer("changed", 104.0) == [-104.0] * 4
    assert served.stubs("changed") == old
    assert "changed" not in served.text


def test_a_crash_loop_is_given_up(served: Supervised) -> None:
    """With the reason; the others serve all the while."""
    served.until(lambda: "GIVEN UP dies_in_init" in served.log)
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


def _document(repository: Path, name: str) -> str:
    """A config for at most three rows, as load requests have it."""
    return json.dumps(pbtxt.read(repository / "steady") | {"name": name, "max_batch_size": 3})


def test_loads_and_unloads_by_users(served: Supervised, repository: Path) -> None:
    """What a user unloads is not missed; what a user loads is healed, with its config.pbtxt.

    Files that came with a load are not known: it stays down, with the reason.
    """
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        # A version that does not load: what served before goes on.
        (repository / "changed" / "2").mkdir()
        (repository / "changed" / "2" / "model.py").write_text("raise ValueError('no luck')\n")
        with pytest.raises(InferenceServerException, match="no luck"):
            client.load_model("changed")
        assert served.ready("changed")
        assert _answers(served, "changed")
        shutil.rmtree(repository / "changed" / "2")
        client.unload_model("changed")
        served.until(lambda: served.ask("/ready/changed")[0] == 404)
        served.until_told("RELEASED changed")

        client.load_model("changed", config=_document(repository, "changed"))
        served.until(lambda: served.ready("changed"))
        old = served.stubs("changed")
        _kill(old)
        _healed(served, "changed", old, "(attempt 1 of 3)")
        assert client.get_model_config("changed").config.max_batch_size > 3

        files = {"file:1/model.py": _MODULE.format(imported="", built="pass").encode()}
        client.load_model("uploaded", config=_document(repository, "uploaded"), files=files)
        served.until(lambda: served.ready("uploaded"))
        assert _answers(served, "uploaded")
        _kill(served.in_state("uploaded", InstanceState.IDLE))
        served.until_told("GIVEN UP uploaded: instance uploaded_0_0 was ended by SIGKILL")
        assert "SIGKILL" in _why(served, "uploaded")
        served.until(lambda: not client.is_model_ready("uploaded"))
