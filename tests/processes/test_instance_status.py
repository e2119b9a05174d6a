from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import build
import pytest

from torch_py_backend.processes import instance_status
from torch_py_backend.processes.instance_status import InstanceState, InstanceStatus, Reader


def _start(**options: int) -> InstanceStatus:
    config = build.config(Path("/models/grüße"), name="grüße", instance="grüße_0_1", **options)
    return instance_status.start(config)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The status folder of a supervisor."""
    monkeypatch.setenv(instance_status.VARIABLE, str(tmp_path))
    return tmp_path


def _reader(folder: Path) -> Reader:
    (path,) = instance_status.files(folder)
    return Reader(path)


def test_without_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are timed all the same."""
    monkeypatch.setenv(instance_status.VARIABLE, "/no/such/folder")
    monkeypatch.chdir(tmp_path)
    status = _start()
    status.idle()
    assert status.running_seconds() == 0
    status.busy()
    seconds = [status.running_seconds(), status.running_seconds()]
    assert 0 < seconds[0] < seconds[1] < 60
    status.idle()
    assert status.running_seconds() == 0
    status.poisoned("a reason")
    status.ended()
    assert list(tmp_path.iterdir()) == []


def test_states_follow_the_calls(folder: Path) -> None:
    """A normal end removes the file."""
    before = time.monotonic()
    status = _start(execution_timeout_ms=250)
    reader = _reader(folder)
    assert reader.identity == (os.getpid(), "grüße", "grüße_0_1", 250, False)
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]
    statuses = [reader.read()]
    for report in (status.idle, status.busy, status.idle):
        report()
        assert status.running_seconds() >= 0
        statuses.append(reader.read())
    states = [entry.state.name for entry in statuses]
    assert states == ["LOADING", "IDLE", "BUSY", "IDLE"]
    times = [before, *(entry.since for entry in statuses), time.monotonic()]
    assert times == sorted(times)
    status.ended()
    status.ended()
    assert instance_status.files(folder) == []
    status.idle()  # Triton may still be in a call


def test_poisoned_stays_poisoned_and_a_damaged_report_says_what_came_before(folder: Path) -> None:
    status = _start()
    reader = _reader(folder)
    status.report({"warnings": ["größer"]})
    status.poisoned("an illegal address: größer")
    for report in (status.busy, status.idle, status.idle, status.ended):
        report()
    assert reader.read().state is InstanceState.POISONED
    assert _reader(folder).identity == (os.getpid(), "grüße", "grüße_0_1", None, False)
    with reader.path.open("ab") as file:
        file.write(b'{"poisoned": ')
    assert reader.report() == {"warnings": ["größer"], "poisoned": "an illegal address: größer"}
    reader.path.unlink()
    assert reader.report() == {}
