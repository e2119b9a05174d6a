"""Instances that die, hang or are poisoned: small processes that publish a status."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import instance, until

from torch_py_backend.server import cleanup, instances
from torch_py_backend.server.instances import InstanceFailure, InstanceMonitor


@pytest.fixture
def monitor(tmp_path: Path) -> InstanceMonitor:
    return InstanceMonitor(tmp_path, load_seconds=1)


@pytest.fixture
def publish(tmp_path: Path) -> Iterator[Any]:
    """Starts processes that publish a status in the monitored folder."""
    with contextlib.ExitStack() as stack:
        yield lambda *words, **options: stack.enter_context(instance(tmp_path, *words, **options))


def test_shared_memory_of_a_dead_instance(
    monitor: InstanceMonitor, publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton would keep it until the server ends. Damaged status files are ignored."""
    (tmp_path / "1.status").write_bytes(b"?")
    (tmp_path / "2.status").mkdir()
    monkeypatch.setattr(cleanup, "SHARED_MEMORY", tmp_path)
    dies, ends, others = "torch_py_backend_0_5f-e", "torch_py_backend_0_60-e", "another_5f-e"
    processes = []
    for region, then in ((dies, ""), (others, ""), (ends, "input(); status.ended()")):
        (tmp_path / region).touch()
        processes.append(publish("status.idle()", "model.py", region, "1048576", then=then))
    assert monitor.check() == []
    processes[2].tell()
    until(lambda: not (tmp_path / f"{processes[2].pid}.status").exists())
    for process in processes:
        process.kill()
    # A normal end, as when Triton unloads a model, is no failure.
    failed = {failure.identity.pid for failure in monitor.check()}
    assert failed == {processes[0].pid, processes[1].pid}
    assert {path.name for path in tmp_path.glob("*-e")} == {others, ends}


# Overwrites the variables of a process in its memory, as setproctitle does, once it was seen.
_OVERWRITE = (
    "input(); fields = Path('/proc/self/stat').read_text().rpartition(')')[2].split();"
    " start, end = map(int, fields[47:49]); ctypes.memset(start, 0, end - start); status.busy()"
)
# What each instance publishes, what it does then, and what the failure says.
_FAILURES = [
    ("status.idle()", _OVERWRITE, "hung: a call took longer than EXECUTION_TIMEOUT_MS, 30 ms"),
    ("status.busy()", "", "hung: a call took longer than EXECUTION_TIMEOUT_MS, 30 ms"),
    ("status.idle()", "os.kill(os.getpid(), 9)", "was ended by SIGKILL (a kill, or"),
    ("status.idle()", "os.kill(os.getpid(), 7)", "was ended by SIGBUS (is /dev/shm full?)"),
    ("status.busy()", "os._exit(0)", "died"),
    ("pass", "os._exit(3)", "ended with exit code 3 while it was loaded"),
    ("status.idle()", "os.kill(os.getpid(), signal.SIGSTOP)", "was stopped for 2 s"),
    ("pass", "", "took longer than 1 s (--load-timeout) while it was loaded"),
    ("status.poisoned('illegal address')", "", "cannot compute any more: illegal address"),
]


def test_instances_that_fail_are_reported_once_and_killed(
    monitor: InstanceMonitor, publish: Any, tmp_path: Path
) -> None:
    serving = publish("status.idle()")
    processes = [
        publish(what, then=then, limit=30 if "hung" in says else 0)
        for what, then, says in _FAILURES
    ]
    failures: list[InstanceFailure] = monitor.check()
    processes[0].tell()
    while len(monitor.instances("m")) > 1:
        failures += monitor.check()
        time.sleep(0.01)
    assert len(failures) == len(processes)
    reported = {failure.identity.pid: failure for failure in failures}
    for process, (what, then, says) in zip(processes, _FAILURES, strict=True):
        failure = reported[process.pid]
        assert failure.reason.startswith(f"instance m_0_0 {says}")
        assert failure.in_load == (what == "pass")
        assert process.process.wait(60) == -signal.SIGKILL or "os." in then
    assert serving.process.poll() is None
    assert [path.stem for path in tmp_path.glob("*.status")] == [str(serving.pid)]


def test_instances_at_work_are_left_alone(
    publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only calls have a limit; one during which no other thread runs is busy, not stopped."""
    monkeypatch.setattr(instances, "_STOPPED_S", 0.05)
    monitor = InstanceMonitor(tmp_path)
    idle = publish("status.report({'warnings': ['old']}); status.busy(); status.idle()", limit=1)
    other = publish("status.idle()", model="n")
    monitor.check()
    assert monitor.warnings("m") == ["old"]
    assert monitor.models_with_instances() == {"m", "n"}
    assert 0 < monitor.idle_seconds("m") < 60
    assert monitor.idle_seconds("unknown") == 0
    loading = publish("pass", limit=1)
    # PyDLL keeps the GIL during the call.
    busy = publish("status.busy()", then="ctypes.PyDLL(None).sleep(1000)", limit=600_000)
    for _ in range(20):
        assert monitor.check() == []
        time.sleep(0.01)
    assert monitor.warnings("m") == []  # of the newest
    assert monitor.idle_seconds("m") == 0
    idle.process.send_signal(signal.SIGSTOP)  # as profilers do, for a moment
    assert monitor.check() == []
    idle.process.send_signal(signal.SIGCONT)
    assert len(monitor.instances("m")) == 3
    monitor.disregard("m")
    new = publish("status.idle()", then="print(input(), flush=True)")
    assert monitor.check() == []
    monitor.kill_idle("m", left=True)
    assert idle.process.wait(60) == -signal.SIGKILL
    assert new.ask("lives") == "lives"
    assert monitor.check() == []
    assert [one.process.poll() for one in (loading, busy, other)] == [None] * 3


def test_processes_of_others_are_never_killed(monitor: InstanceMonitor, publish: Any) -> None:
    """A file may name one: its process ID was used again."""
    busy = publish("status.busy()", limit=1, mark=False)
    idle = publish("status.idle()", model="n", mark=False)
    assert {failure.identity.model for failure in monitor.check()} == {"m", "n"}
    monitor.kill_idle("n", left=True)
    monitor.check()
    for process in (busy, idle):
        with pytest.raises(subprocess.TimeoutExpired):
            process.process.wait(0.05)
