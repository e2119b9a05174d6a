"""Instances that die, hang or are poisoned, in the role of which small processes stand."""

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
from torch_py_backend.processes.instance_status import Identity, InstanceState, SharedStatus
from torch_py_backend.server import instances
from torch_py_backend.server.instances import InstanceFailure, InstanceMonitor


@pytest.fixture(params=["pidfd", "polling"])
def monitor(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[InstanceMonitor]:
    """A monitor over a folder; also as on a kernel without descriptors of processes."""
    if request.param == "polling":

        def missing(pid: int, flags: int = 0) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", missing)
    made = InstanceMonitor(tmp_path)
    yield made
    made.close()


def _until(monitor: InstanceMonitor) -> InstanceFailure:
    """The next failure."""
    for _ in range(6000):
        failures = monitor.check()
        if failures:
            (failure,) = failures
            return failure
        monitor.wait(0.01)
    raise AssertionError("nobody fell")


@pytest.mark.parametrize(
    ("what", "then", "says"),
    [
        ("status.ready()", "os.kill(os.getpid(), signal.SIGKILL)", "m_0_0 was ended by SIGKILL"),
        ("status.ready()", "os.kill(os.getpid(), signal.SIGBUS)", "SIGBUS (is /dev/shm full?)"),
        ("status.ready()", "ctypes.string_at(0)", "was ended by SIGSEGV"),
        ("status.ready()", "os._exit(3)", "m_0_0 ended with exit code 3"),
        ("status.busy()", "os._exit(0)", "m_0_0 died"),
        ("pass", "os._exit(3)", "ended with exit code 3 while it was loaded"),
    ],
    ids=["killed", "bus", "segfault", "exit", "exit 0", "loading"],
)
def test_deaths(what: str, then: str, says: str, monitor: InstanceMonitor, tmp_path: Path) -> None:
    """Each death is reported once, with how it came about, and its file is removed."""
    with instance(tmp_path, what, then=then) as process:
        ended(process)
        failure = _until(monitor)
        assert says in failure.reason
        assert (failure.identity.model, failure.identity.pid) == ("m", process.pid)
        assert monitor.check() == []
        assert monitor.live_processes("m") == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "status", "stays"),
    [
        ("torch_py_backend_0123456789ab_5f-e", "status.busy()", False),
        ("torch_py_backend_0123456789ab_5f-e", "status.ended()", True),
        ("torch_py_backend_0123456789ab_owner", "status.busy()", True),
        ("another", "status.busy()", True),
        ("../torch_py_backend_0123456789ab_5f-e", "status.busy()", True),
        ("", "status.busy()", True),
    ],
    ids=["died", "ended in order", "the owner's", "another's", "outside", "not known"],
)
def test_shared_memory_of_the_dead(
    name: str,
    status: str,
    stays: bool,
    monitor: InstanceMonitor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The region of one that died is removed; Triton would keep it until the server ends."""
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(orphan_cleanup, "SHARED_MEMORY", shared)
    region = shared / (name or "unknown")
    region.write_bytes(b"?")
    what = (
        f"identity = Identity(os.getpid(), model, '', '', None, {name!r});"
        " status = SharedStatus(folder, identity, InstanceState.IDLE)"
    )
    with instance(tmp_path, f"{what}; {status}") as process:
        assert monitor.check() == []
        assert region.exists()
        process.kill()
        ended(process)
        monitor.check()
    assert region.exists() is stays


def test_one_that_lives(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """A process that is loaded, works and waits is left alone, as long as it may take."""
    with instance(tmp_path, "status.busy()") as process:
        assert monitor.check() == []
        assert monitor.live_processes("m") == {process.pid}
        assert monitor.live_processes("n") == set()


def test_an_end_in_order(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """Triton may take its model out of service: nobody fell."""
    with instance(tmp_path, "status.ready()", then="sys.stdin.read(); status.ended(); os._exit(0)"):
        assert monitor.check() == []
    with instance(tmp_path, "status.ready(); status.ended()", then="os._exit(0)") as process:
        ended(process)
        failures = [one for one in monitor.check() if one.identity.pid == process.pid]
        assert failures == []


@pytest.mark.parametrize(
    ("what", "then", "says"),
    [
        ("status.busy()", "", "hung: a call took longer than EXECUTION_TIMEOUT_MS, 30 ms"),
        ("status.busy()", "os.kill(os.getpid(), signal.SIGSTOP)", "EXECUTION_TIMEOUT_MS"),
        ("status.ready()", "os.kill(os.getpid(), signal.SIGSTOP)", "was stopped for 0.2 s"),
        ("pass", "os.kill(os.getpid(), signal.SIGSTOP)", "stopped for 0.2 s by a signal"),
    ],
    ids=["busy", "stopped in a call", "stopped at rest", "stopped while loading"],
)
def test_one_that_hangs(
    what: str,
    then: str,
    says: str,
    monitor: InstanceMonitor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What takes longer than its limit is ended, and reported once."""
    monkeypatch.setattr(instances, "_STOPPED_S", 0.2)
    with instance(tmp_path, what, then=then, limit=30) as process:
        assert says in _until(monitor).reason
        assert process.wait(60) == -signal.SIGKILL
        while monitor.live_processes("m"):
            monitor.wait(0.01)
        assert monitor.check() == []


def test_a_stopped_instance_is_ended_without_any_option(
    monitor: InstanceMonitor, tmp_path: Path
) -> None:
    """Triton 24.10 aborts when an instance goes on that was stopped for 6 s: it never goes on."""
    with instance(tmp_path, "status.busy()") as process:
        assert monitor.check() == []
        process.send_signal(signal.SIGSTOP)
        assert "was stopped for 2 s" in _until(monitor).reason
        assert process.wait(60) == -signal.SIGKILL


def test_an_instance_that_holds_the_gil_is_left_alone(
    monitor: InstanceMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that lets no other thread of its process run is busy, not stopped."""
    monkeypatch.setattr(instances, "_STOPPED_S", 0.05)
    then = "ctypes.PyDLL(None).sleep(1000)"  # PyDLL keeps the GIL during the call
    with instance(tmp_path, "status.busy()", then=then) as process:
        for _ in range(20):
            assert monitor.check() == []
            monitor.wait(0.01)
        assert process.poll() is None


def test_a_short_stop_is_no_fall(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """A profiler stops a process for moments only."""
    with instance(tmp_path, "status.ready()") as process:
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            assert monitor.check() == []
            process.send_signal(signal.SIGCONT)
            assert monitor.check() == []
        assert process.poll() is None


@pytest.mark.parametrize(
    ("membership", "file", "contents", "frozen"),
    [
        ("0::/a/b\n", "a/b/cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/a/b\n", "unified/a/b/cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/a/b\n", "a/b/cgroup.events", "populated 1\nfrozen 0\n", False),
        ("6:freezer:/a\n0::/\n", "freezer/a/freezer.state", "FROZEN\n", True),
        ("6:freezer:/a\n0::/\n", "freezer/a/freezer.state", "THAWED\n", False),
        ("7:name=systemd:/x:y\n", "unknown", "", False),
        ("", "unknown", "", False),
    ],
    ids=["v2", "v2 beside v1", "v2, runs", "v1", "v1, runs", "no freezer", "gone"],
)
def test_frozen_cgroups(
    membership: str,
    file: str,
    contents: str,
    frozen: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frozen process is stopped, though its state is "sleeping"; the files are the kernel's."""
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(contents)
    read = instances._read_text
    monkeypatch.setattr(instances, "_CGROUPS", tmp_path)
    monkeypatch.setattr(
        instances,
        "_read_text",
        lambda one: membership if one == Path("/proc/17/cgroup") else read(one),
    )
    assert instances._is_frozen(17) is frozen


def test_a_load_that_takes_too_long(tmp_path: Path) -> None:
    """The limit is of each instance, whoever requested its load; what serves has none."""
    monitor = InstanceMonitor(tmp_path, load_seconds=0.2)
    with (
        instance(tmp_path, "status.ready()") as serving,
        instance(tmp_path, "pass") as loading,
    ):
        failure = _until(monitor)
        assert failure.identity.pid == loading.pid
        assert failure.loading
        assert failure.reason == (
            "instance m_0_0 took longer than 0.2 s (--load-timeout) while it was loaded"
        )
        assert loading.wait(60) == -signal.SIGKILL
        assert serving.poll() is None
    monitor.close()


@pytest.mark.parametrize("what", ["pass", "status.ready()", "status.busy(); status.idle()"])
def test_only_calls_have_a_limit(what: str, monitor: InstanceMonitor, tmp_path: Path) -> None:
    """Loading may take long, and so may waiting."""
    with instance(tmp_path, what, limit=1) as process:
        time.sleep(0.05)
        assert monitor.check() == []
        assert process.poll() is None


def test_one_that_is_poisoned(
    monitor: InstanceMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported at once, may send what it has, and is ended then."""
    monkeypatch.setattr(instances, "_GRACE_S", 0.2)
    with instance(tmp_path, "status.ready(); status.poisoned('illegal address')") as process:
        assert _until(monitor).reason == "instance m_0_0 cannot compute any more: illegal address"
        while monitor.live_processes("m"):
            assert monitor.check() == []
            monitor.wait(0.01)
        assert process.wait(60) == -signal.SIGKILL
        assert monitor.check() == []


def test_one_that_completes_a_config(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """Triton would wait for it for ever: the failure says that it was none of the instances yet."""
    what = (
        "identity = Identity(os.getpid(), model, '', '', None);"
        " status = SharedStatus(folder, identity, InstanceState.COMPLETING)"
    )
    with instance(tmp_path, what, then="os._exit(1)") as process:
        ended(process)
        failure = _until(monitor)
        assert failure.completing
        assert failure.reason == "the process that completes its config ended with exit code 1"


def test_only_instances_in_a_state_are_ended(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """A load that takes too long is ended; what serves meanwhile is not."""
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
def test_strangers_are_never_killed(
    what: str, monitor: InstanceMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that names a process which our server did not start, leads to no kill."""
    monkeypatch.setattr(instances, "_GRACE_S", 0.0)
    with instance(tmp_path, what, limit=1, mark=False) as process:
        time.sleep(0.05)
        assert len(monitor.check()) == 1
        monitor.check()
        time.sleep(0.05)
        assert process.poll() is None
        assert monitor.kill("m", InstanceState.BUSY) == 0


def test_a_number_that_is_a_stranger_s_by_now(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """An instance died before it was looked at, and its number was given again: it fell."""
    code = "import time; print(flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()  # until it runs, its environment cannot be read
        SharedStatus(tmp_path, Identity(stranger.pid, "m", "1", "m_0_0", 1), InstanceState.BUSY)
        assert _until(monitor).reason == "instance m_0_0 died"
        assert stranger.poll() is None
        stranger.kill()


def test_files_that_are_none(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """Damaged files are passed over."""
    (tmp_path / "1.status").write_bytes(b"?")
    (tmp_path / "2.status").mkdir()
    assert monitor.check() == []


def test_a_wait_can_be_ended(monitor: InstanceMonitor) -> None:
    """Whoever has news wakes the watcher, once."""
    monitor.wake()
    monitor.wake()
    monitor.wait(1000)
    monitor.wait(0.001)
