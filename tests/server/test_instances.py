"""Instances that die, hang or are poisoned: small processes that publish a status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ended, instance

from torch_py_backend.processes import orphan_cleanup
from torch_py_backend.processes.instance_status import Identity, InstanceState, InstanceStatus
from torch_py_backend.server import instances
from torch_py_backend.server.instances import InstanceFailure, InstanceMonitor


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[InstanceMonitor]:
    monitor = InstanceMonitor(tmp_path)
    yield monitor
    monitor.close()


@pytest.fixture
def without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel without pidfds."""

    def missing(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)


def _until(monitor: InstanceMonitor) -> InstanceFailure:
    """The next failure."""
    for _ in range(6000):
        failures = monitor.check()
        if failures:
            (failure,) = failures
            return failure
        monitor.wait(0.01)
    raise AssertionError("no failure")


@pytest.mark.parametrize(
    ("what", "then", "says"),
    [
        ("status.ready()", "os.kill(os.getpid(), signal.SIGKILL)", "m_0_0 was ended by SIGKILL"),
        ("status.ready()", "os.kill(os.getpid(), signal.SIGBUS)", "SIGBUS (is /dev/shm full?)"),
        ("status.busy()", "os._exit(0)", "m_0_0 died"),
        ("pass", "os._exit(3)", "m_0_0 ended with exit code 3 while it was loaded"),
    ],
    ids=["killed", "bus", "exit 0", "loading"],
)
def test_deaths(what: str, then: str, says: str, monitor: InstanceMonitor, tmp_path: Path) -> None:
    """Each death is reported once, with its cause, and the file is removed."""
    with instance(tmp_path, what, then=then) as process:
        ended(process)
        failure = _until(monitor)
        assert says in failure.reason
        assert (failure.identity.model, failure.identity.pid) == ("m", process.pid)
        assert monitor.check() == []
        assert monitor.live_processes("m") == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_pidfds")
def test_a_kernel_without_pidfds(
    monitor: InstanceMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes are polled: a stopped one is killed, and its end is noticed."""
    monkeypatch.setattr(instances, "_STOPPED_S", 0.2)
    with instance(tmp_path, "status.ready()") as process:
        assert monitor.check() == []
        assert monitor.live_processes("m") == {process.pid}
        process.send_signal(signal.SIGSTOP)
        assert "was stopped for 0.2 s" in _until(monitor).reason
        ended(process)
        assert monitor.live_processes("m") == set()
        assert monitor.check() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "status", "stays"),
    [
        ("torch_py_backend_0123456789ab_5f-e", "status.busy()", False),
        ("torch_py_backend_0123456789ab_5f-e", "status.ended()", True),
        ("torch_py_backend_0123456789ab_owner", "status.busy()", True),
        ("../torch_py_backend_0123456789ab_5f-e", "status.busy()", True),
    ],
    ids=["died", "ended normally", "the owner's", "outside"],
)
def test_shared_memory_of_a_dead_instance(
    name: str,
    status: str,
    stays: bool,
    monitor: InstanceMonitor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is removed; Triton would keep it until the server ends."""
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(orphan_cleanup, "SHARED_MEMORY", shared)
    region = shared / name
    region.write_bytes(b"?")
    what = (
        f"identity = Identity(os.getpid(), model, '', '', None, {name!r});"
        " status = InstanceStatus(InstanceState.IDLE); status.publish(folder, identity)"
    )
    with instance(tmp_path, f"{what}; {status}") as process:
        assert monitor.check() == []
        assert region.exists()
        process.kill()
        ended(process)
        monitor.check()
    assert region.exists() is stays


@pytest.mark.parametrize("what", ["pass", "status.ready()", "status.busy(); status.idle()"])
def test_a_live_instance(what: str, monitor: InstanceMonitor, tmp_path: Path) -> None:
    """Loading may take long, and so may waiting: only calls have a limit."""
    with instance(tmp_path, what, limit=1) as process:
        time.sleep(0.05)
        assert monitor.check() == []
        assert monitor.live_processes("m") == {process.pid}
        assert monitor.live_processes("n") == set()
        assert process.poll() is None


def test_a_normal_end(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """Triton may unload the model: this is no failure."""
    with instance(tmp_path, "status.ready()", then="sys.stdin.read(); status.ended(); os._exit(0)"):
        assert monitor.check() == []
    with instance(tmp_path, "status.ready(); status.ended()", then="os._exit(0)") as process:
        ended(process)
        assert process.pid not in {failure.identity.pid for failure in monitor.check()}


@pytest.mark.parametrize(
    ("what", "then", "says"),
    [
        ("status.busy()", "", "hung: a call took longer than EXECUTION_TIMEOUT_MS, 30 ms"),
        ("pass", "os.kill(os.getpid(), signal.SIGSTOP)", "stopped for 0.2 s by a signal"),
    ],
    ids=["busy", "stopped while loading"],
)
def test_an_instance_that_hangs(
    what: str,
    then: str,
    says: str,
    monitor: InstanceMonitor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is killed, and reported once."""
    monkeypatch.setattr(instances, "_STOPPED_S", 0.2)
    with instance(tmp_path, what, then=then, limit=30) as process:
        assert says in _until(monitor).reason
        assert process.wait(60) == -signal.SIGKILL
        while monitor.live_processes("m"):
            monitor.wait(0.01)
        assert monitor.check() == []


def test_a_stopped_instance_is_killed_after_two_seconds(
    monitor: InstanceMonitor, tmp_path: Path
) -> None:
    """Triton 24.10 aborts if an instance runs again after it was stopped for 6 s."""
    with instance(tmp_path, "status.busy()") as process:
        assert monitor.check() == []
        process.send_signal(signal.SIGSTOP)
        assert "was stopped for 2 s" in _until(monitor).reason
        assert process.wait(60) == -signal.SIGKILL


def test_an_instance_that_holds_the_gil_is_left_alone(
    monitor: InstanceMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call during which no other thread runs is busy, not stopped."""
    monkeypatch.setattr(instances, "_STOPPED_S", 0.05)
    then = "ctypes.PyDLL(None).sleep(1000)"  # PyDLL keeps the GIL during the call
    with instance(tmp_path, "status.busy()", then=then) as process:
        for _ in range(20):
            assert monitor.check() == []
            monitor.wait(0.01)
        assert process.poll() is None


def test_a_short_stop_is_no_failure(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """Profilers stop processes for moments."""
    with instance(tmp_path, "status.ready()") as process:
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            assert monitor.check() == []
            process.send_signal(signal.SIGCONT)
            assert monitor.check() == []
        assert process.poll() is None


def test_a_load_that_takes_too_long(tmp_path: Path) -> None:
    """The limit holds for loads through Triton's API, too, and not for instances that serve."""
    monitor = InstanceMonitor(tmp_path, load_seconds=0.2)
    with (
        instance(tmp_path, "status.ready()") as serving,
        instance(tmp_path, "pass") as loading,
    ):
        failure = _until(monitor)
        assert failure.identity.pid == loading.pid
        assert failure.state is InstanceState.LOADING
        assert failure.reason == (
            "instance m_0_0 took longer than 0.2 s (--load-timeout) while it was loaded"
        )
        assert loading.wait(60) == -signal.SIGKILL
        assert serving.poll() is None
    monitor.close()


def test_a_poisoned_instance(
    monitor: InstanceMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported at once, and killed a moment later: it may send computed results."""
    monkeypatch.setattr(instances, "_GRACE_S", 0.2)
    with instance(tmp_path, "status.ready(); status.poisoned('illegal address')") as process:
        assert _until(monitor).reason == "instance m_0_0 cannot compute any more: illegal address"
        while monitor.live_processes("m"):
            assert monitor.check() == []
            monitor.wait(0.01)
        assert process.wait(60) == -signal.SIGKILL
        assert monitor.check() == []


def test_a_process_that_completes_a_config(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """Triton never stops waiting for it: its failure is marked."""
    what = (
        "identity = Identity(os.getpid(), model, '', '', None);"
        " status = InstanceStatus(InstanceState.COMPLETING); status.publish(folder, identity)"
    )
    with instance(tmp_path, what, then="os._exit(1)") as process:
        ended(process)
        failure = _until(monitor)
        assert failure.state is InstanceState.COMPLETING
        assert failure.reason == "the process that completes its config ended with exit code 1"


def test_idle_seconds(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """All instances of a model wait, since the last call or load."""
    with instance(tmp_path, "status.ready()"):
        monitor.check()
        assert monitor.idle_seconds("n") == 0
        assert 0 < monitor.idle_seconds("m") < 60
        with instance(tmp_path, "status.ready(); status.busy()"):
            monitor.check()
            assert monitor.idle_seconds("m") == 0


def test_is_loading(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """An instance that serves, or has died, is not being loaded."""
    with instance(tmp_path, "status.ready()"):
        monitor.check()
        assert not monitor.is_loading()
        with instance(tmp_path, "pass") as loading:
            monitor.check()
            assert monitor.is_loading()
            loading.kill()
            ended(loading)
            monitor.check()
            assert not monitor.is_loading()


def test_kill_by_model_and_state(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """Other models, and instances in other states, are not killed."""
    with (
        instance(tmp_path, "pass") as loading,
        instance(tmp_path, "status.ready()") as serving,
        instance(tmp_path, "pass", model="n") as other,
    ):
        monitor.check()
        assert monitor.kill("m", InstanceState.LOADING) == 1
        assert loading.wait(60) == -signal.SIGKILL
        assert serving.poll() is None
        assert other.poll() is None


@pytest.mark.parametrize("what", ["status.busy()", "status.poisoned('?')"])
def test_processes_of_others_are_never_killed(
    what: str, monitor: InstanceMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may name a process that our server did not start."""
    monkeypatch.setattr(instances, "_GRACE_S", 0.0)
    with instance(tmp_path, what, limit=1, mark=False) as process:
        time.sleep(0.05)
        assert len(monitor.check()) == 1
        monitor.check()
        time.sleep(0.05)
        assert process.poll() is None
        assert monitor.kill("m", InstanceState.BUSY) == 0


def test_a_process_id_that_was_used_again(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """An instance died before it was checked, and another process has its ID: it died."""
    code = "import time; print(flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()  # until it runs, its environment cannot be read
        identity = Identity(stranger.pid, "m", "1", "m_0_0", 1)
        InstanceStatus(InstanceState.BUSY).publish(tmp_path, identity)
        assert _until(monitor).reason == "instance m_0_0 died"
        assert stranger.poll() is None
        stranger.kill()


def test_damaged_files(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """They are ignored."""
    (tmp_path / "1.status").write_bytes(b"?")
    (tmp_path / "2.status").mkdir()
    assert monitor.check() == []


def test_wake_ends_one_wait(monitor: InstanceMonitor) -> None:
    """Several calls end one wait, also if they come before it."""
    monitor.wake()
    monitor.wake()
    monitor.wait(1000)
    monitor.wait(0.001)
