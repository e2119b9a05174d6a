"""Instances that die, hang or are poisoned: small processes that publish a status."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from pathlib import Path

import pytest
from children import ended, instance

from torch_py_backend.server import cleanup, instances
from torch_py_backend.server.instances import InstanceFailure, InstanceMonitor


@pytest.fixture
def monitor(tmp_path: Path) -> InstanceMonitor:
    return InstanceMonitor(tmp_path, load_seconds=1)


def _next_failure(monitor: InstanceMonitor) -> InstanceFailure:
    for _ in range(6000):
        failures = monitor.check()
        if failures:
            (failure,) = failures
            return failure
        time.sleep(0.01)
    raise AssertionError("no failure")


@pytest.mark.parametrize(
    ("name", "status", "stays"),
    [
        ("torch_py_backend_0123456789ab_5f-e", "status.busy()", False),
        ("torch_py_backend_0123456789ab_5f-e", "status.ended()", True),
        ("another_5f-e", "status.busy()", True),
    ],
    ids=["died", "ended normally", "another's"],
)
def test_shared_memory_of_a_dead_instance(
    name: str,
    status: str,
    stays: bool,
    monitor: InstanceMonitor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton would keep it until the server ends. Damaged status files are ignored."""
    (tmp_path / "1.status").write_bytes(b"?")
    (tmp_path / "2.status").mkdir()
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(cleanup, "SHARED_MEMORY", shared)
    region = shared / name
    region.write_bytes(b"?")
    with instance(tmp_path, f"status.idle(); {status}", "model.py", name, "1048576") as process:
        assert monitor.check() == []
        assert region.exists()
        process.kill()
        ended(process)
        # A normal end, as when Triton unloads a model, is no failure.
        assert len(monitor.check()) == ("ended" not in status)
    assert region.exists() is stays


@pytest.mark.parametrize(
    ("what", "then", "says"),
    [
        ("status.idle()", "os.kill(os.getpid(), 9)", "was ended by SIGKILL (a kill, or"),
        ("status.idle()", "os.kill(os.getpid(), 7)", "was ended by SIGBUS (is /dev/shm full?)"),
        ("status.busy()", "os._exit(0)", "died"),
        ("pass", "os._exit(3)", "ended with exit code 3 while it was loaded"),
        ("status.busy()", "", "hung: a call took longer than EXECUTION_TIMEOUT_MS, 30 ms"),
        ("status.idle()", "os.kill(os.getpid(), signal.SIGSTOP)", "was stopped for 2 s"),
        ("pass", "", "took longer than 1 s (--load-timeout) while it was loaded"),
        ("status.poisoned('illegal address')", "", "cannot compute any more: illegal address"),
    ],
)
def test_an_instance_that_fails_is_reported_once_and_killed(
    what: str, then: str, says: str, monitor: InstanceMonitor, tmp_path: Path
) -> None:
    limit = 30 if "hung" in says else 0
    with (
        instance(tmp_path, "status.idle()") as serving,
        instance(tmp_path, what, then=then, limit=limit) as process,
    ):
        failure = _next_failure(monitor)
        assert (failure.identity.pid, failure.in_load) == (process.pid, what == "pass")
        assert failure.reason.startswith(f"instance m_0_0 {says}")
        while len(monitor.instances("m")) > 1:
            assert monitor.check() == []
            time.sleep(0.01)
        assert process.wait(60) == -signal.SIGKILL or then
        assert serving.poll() is None
        assert [path.stem for path in tmp_path.glob("*.status")] == [str(serving.pid)]


def test_instances_at_work_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only calls have a limit; one during which no other thread runs is busy, not stopped."""
    monkeypatch.setattr(instances, "_STOPPED_S", 0.05)
    monitor = InstanceMonitor(tmp_path)
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(instance(tmp_path, what, then=then, limit=limit))
            for what, then, limit in (
                ("pass", "", 1),
                ("status.idle()", "", 1),
                ("status.busy(); status.idle()", "", 1),
                # PyDLL keeps the GIL during the call.
                ("status.busy()", "ctypes.PyDLL(None).sleep(1000)", 600_000),
            )
        ]
        for _ in range(20):
            assert monitor.check() == []
            time.sleep(0.01)
        processes[1].send_signal(signal.SIGSTOP)  # as profilers do, for a moment
        assert monitor.check() == []
        processes[1].send_signal(signal.SIGCONT)
        assert len(monitor.instances("m")) == 4
        assert [process.poll() for process in processes] == [None] * 4


def test_what_the_instances_of_a_model_do(tmp_path: Path) -> None:
    monitor = InstanceMonitor(tmp_path)
    with (
        instance(tmp_path, "status.report({'warnings': ['old']}); status.idle()") as idle,
        instance(tmp_path, "status.idle()", model="n") as other,
    ):
        monitor.check()
        assert monitor.warnings("m") == ["old"]
        assert monitor.models_with_instances() == {"m", "n"}
        assert 0 < monitor.idle_seconds("m") < 60
        assert monitor.idle_seconds("unknown") == 0
        with instance(tmp_path, "pass") as loading, instance(tmp_path, "status.busy()") as busy:
            monitor.check()
            assert monitor.warnings("m") == []  # of the newest
            assert monitor.idle_seconds("m") == 0
            monitor.disregard("m")
            monitor.kill_idle("m")
            assert idle.wait(60) == -signal.SIGKILL
            assert monitor.check() == []
            assert [process.poll() for process in (loading, busy, other)] == [None] * 3


def test_processes_of_others_are_never_killed(monitor: InstanceMonitor, tmp_path: Path) -> None:
    """A file may name one: its process ID was used again."""
    with (
        instance(tmp_path, "status.busy()", limit=1, mark=False) as busy,
        instance(tmp_path, "status.idle()", model="n", mark=False) as idle,
    ):
        assert {failure.identity.model for failure in monitor.check()} == {"m", "n"}
        monitor.kill_idle("n")
        monitor.check()
        for process in (busy, idle):
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.05)


# Overwrites the variables of a process in its memory, as setproctitle does.
_OVERWRITE = (
    "sys.stdin.readline(); fields = Path('/proc/self/stat').read_text().rpartition(')')[2].split();"
    " start, end = map(int, fields[47:49]); ctypes.memset(start, 0, end - start); status.busy()"
)


def test_an_instance_that_overwrites_its_environment_is_killed_if_it_hangs(
    monitor: InstanceMonitor, tmp_path: Path
) -> None:
    with instance(tmp_path, "status.idle()", then=_OVERWRITE, limit=30) as process:
        assert monitor.check() == []
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert "hung" in _next_failure(monitor).reason
        assert process.wait(60) == -signal.SIGKILL
