"""The status of an instance, and the reader of its file."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
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


@pytest.mark.parametrize("value", ["", "/no/such/folder"])
def test_without_a_supervisor(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written without a status folder, but calls are timed; 0 between them."""
    assert instance_status.files(tmp_path / "none") == []
    monkeypatch.setenv(instance_status.VARIABLE, value)
    monkeypatch.chdir(tmp_path)
    status = instance_status.start(_config())
    status.idle()
    assert status.running_seconds() == 0
    status.busy()
    seconds = [status.running_seconds(), status.running_seconds()]
    assert 0 < seconds[0] < seconds[1] < 60
    status.busy()  # the next try
    assert status.running_seconds() > 0
    status.idle()
    assert status.running_seconds() == 0
    status.poisoned("a reason")
    status.ended()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("parameters", "limit"), [({}, None), ({"EXECUTION_TIMEOUT_MS": "250"}, 250)]
)
def test_identity(
    parameters: dict[str, str], limit: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The private file names the process, the instance, its limit and its shared memory."""
    monkeypatch.setattr(instance_status, "region", lambda: "a_region")
    instance_status.start(_config(**parameters))
    identity = dataclasses.astuple(_reader(folder).identity)
    assert identity == (os.getpid(), "grüße", "grüße_0_1", limit, "a_region", False)
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_config_being_completed(folder: Path) -> None:
    """A process that completes a config has a status: Triton never stops waiting for it."""
    status = instance_status.start_completing("m")
    assert _reader(folder).identity.model == "m"
    assert _reader(folder).read().state is InstanceState.COMPLETING
    status.ended()
    assert instance_status.files(folder) == []


def test_states_follow_the_calls(folder: Path) -> None:
    """Each state is published at once, with its start; a normal end removes the file."""
    before = time.monotonic_ns()
    status = instance_status.start(_config())
    reader = _reader(folder)
    statuses = [reader.read()]
    for report in (status.idle, status.busy, status.idle):
        report()
        assert status.running_seconds() >= 0
        statuses.append(reader.read())
    states = [entry.state.name for entry in statuses]
    assert states == ["LOADING", "IDLE", "BUSY", "IDLE"]
    times = [before, *(entry.since for entry in statuses), time.monotonic_ns()]
    assert times == sorted(times)
    status.ended()
    status.ended()
    assert instance_status.files(folder) == []
    status.idle()  # Triton may still be in a call


def test_poisoned_stays_poisoned(folder: Path) -> None:
    """No later report changes the state, and the end of the instance is no normal end."""
    status = instance_status.start(_config())
    reader = _reader(folder)
    status.poisoned("an illegal address: größer" + "x" * 5000)
    for report in (status.busy, status.idle, status.idle, status.ended):
        report()
    assert reader.read().state is InstanceState.POISONED
    assert reader.read().reason.startswith("an illegal address: größerx")
    assert _reader(folder).identity.model == "grüße"


def _link(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to(path.with_name("real"))


def _identity(**changed: object) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        identity = {"pid": os.getpid(), "model": "m", "instance": "m_0"}
        text = json.dumps(identity | {"limit_ms": None} | changed).encode()
        path.write_bytes(bytes(1024) + text.ljust(path.stat().st_size - 1024, b"\0"))

    return write


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:100]), id="short"),
        pytest.param(lambda path: path.rename(path.with_name("1.status")), id="name"),
        pytest.param(_link, id="link"),
        pytest.param(lambda path: path.write_bytes(b"{" * path.stat().st_size), id="garbage"),
        pytest.param(_identity(pid=1), id="other"),
        pytest.param(_identity(unknown=1), id="unknown"),
        pytest.param(_identity(), id="state"),
        pytest.param(Path.unlink, id="missing"),
    ],
)
def test_a_file_that_is_not_an_instance_s(damage: Callable[[Path], object], folder: Path) -> None:
    """A forged or damaged file is an error: its process might be killed."""
    instance_status.start(_config())
    (path,) = instance_status.files(folder)
    damage(path)
    (remaining,) = instance_status.files(folder) or [path]
    with pytest.raises((ValueError, OSError)):
        Reader(remaining)


def test_region_of_this_process() -> None:
    """It is on the command line of Triton's stub; empty without a name of this backend."""
    region = "torch_py_backend_0123456789ab_5f-e"
    code = "from torch_py_backend.processes import instance_status; print(instance_status.region())"
    for words, name in (
        (["model.py", region, "1048576"], region),
        (["model.py", "triton_python_backend_shm_region_5f-e"], ""),
    ):
        printed = subprocess.check_output([sys.executable, "-c", code, *words], text=True)
        assert printed.strip() == name
