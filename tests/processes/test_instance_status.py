"""The status of an instance, and the reader of its file."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from torch_py_backend.config import model_config
from torch_py_backend.processes import instance_status
from torch_py_backend.processes.instance_status import InstanceState, Reader


def _config(**parameters: str) -> model_config.ModelConfig:
    document = {
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [4]}],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }
    return model_config.parse(
        {
            "model_config": json.dumps(document),
            "model_name": "grüße",
            "model_repository": "/srv/models/grüße",
            "model_version": "3",
            "model_instance_name": "grüße_0_1",
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )


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
    status = instance_status.start(_config())
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
    status = instance_status.start(_config(EXECUTION_TIMEOUT_MS="250"))
    reader = _reader(folder)
    assert reader.identity == (os.getpid(), "grüße", "grüße_0_1", 250, False)
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600] * 2
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


def test_poisoned_stays_poisoned(folder: Path) -> None:
    status = instance_status.start(_config())
    reader = _reader(folder)
    status.poisoned("an illegal address: größer")
    for report in (status.busy, status.idle, status.idle, status.ended):
        report()
    assert reader.read().state is InstanceState.POISONED
    assert reader.report()["poisoned"] == "an illegal address: größer"
    assert _reader(folder).identity.model == "grüße"


def test_a_report_that_is_damaged_later_says_nothing(folder: Path) -> None:
    instance_status.start(_config())
    (path,) = instance_status.files(folder)
    reader = Reader(path)
    path.with_suffix(".json").write_bytes(b"{")
    assert reader.report() == {}
