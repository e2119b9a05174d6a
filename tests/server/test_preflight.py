"""What is wrong with a machine or a model folder, without a change to either."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torch_py_backend.config import execution_env, pbtxt
from torch_py_backend.errors import ConfigError, ServerError
from torch_py_backend.server import preflight, tritonserver
from torch_py_backend.server.tritonserver import TritonInstallation

_WHEEL = Path("/venv/lib/python3.11/site-packages/pytriton/tritonserver/bin/tritonserver")
_NGC = Path("/opt/tritonserver/bin/tritonserver")


class _Machine:
    """A machine without a fault, to be broken by a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.server(_WHEEL)
        self.shared_memory(1 << 30)
        self.versions(numpy="1.26.4")
        monkeypatch.setattr(tritonserver, "environment", lambda triton: {})

    def server(self, executable: Path) -> None:
        found = TritonInstallation(executable, Path("/backend"), Path("/stub"), ())
        self._patch.setattr(tritonserver, "find", lambda: found)

    def shared_memory(self, size: int) -> None:
        usage = {"/dev/shm": SimpleNamespace(total=size, used=0, free=size)}
        self._patch.setattr(shutil, "disk_usage", lambda path: usage[str(path)])

    def versions(self, **versions: str) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        self._patch.setattr(metadata, "version", version)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Machine:
    """A sound machine, and an empty current folder."""
    monkeypatch.chdir(tmp_path)
    return _Machine(monkeypatch)


def _problems() -> list[str]:
    return list(preflight.machine_problems())


def test_sound_machine(machine: _Machine) -> None:
    """Where nothing is wrong, nothing is said."""
    assert _problems() == []


@pytest.mark.parametrize(
    ("size", "says"),
    [(64 << 20, "64 MB"), ((256 << 20) - 1, "255 MB"), (0, "0 MB")],
    ids=["docker's-default", "just-too-small", "none"],
)
def test_small_shared_memory(machine: _Machine, size: int, says: str) -> None:
    """Too little shared memory is a problem, with its size and how a container gets more."""
    machine.shared_memory(size)
    (problem,) = _problems()
    assert says in problem
    assert "--shm-size" in problem


def test_enough_shared_memory(machine: _Machine) -> None:
    """The limit itself is enough."""
    machine.shared_memory(256 << 20)
    assert _problems() == []


@pytest.mark.parametrize(
    ("executable", "version", "count"),
    [
        pytest.param(_WHEEL, "2.0.0", 1, id="wheel-numpy-2"),
        pytest.param(_WHEEL, "10.1", 1, id="wheel-numpy-10"),
        pytest.param(_WHEEL, "1.26.4", 0, id="wheel-numpy-1"),
        pytest.param(_NGC, "2.3.1", 0, id="container-numpy-2"),
    ],
)
def test_numpy(machine: _Machine, executable: Path, version: str, count: int) -> None:
    """Numpy 2 is a problem with the wheel's stub, and with no other."""
    machine.server(executable)
    machine.versions(numpy=version)
    problems = _problems()
    assert len(problems) == count
    assert all(f"numpy {version}" in one and "'numpy<2'" in one for one in problems)


@pytest.mark.parametrize("name", ["torch", "numpy", "safetensors"])
def test_missing_package(machine: _Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A package that the backend needs, and this Python lacks, is named with its cure."""
    find = importlib.util.find_spec

    def lacking(wanted: str, package: str | None = None) -> Any:
        return None if wanted == name else find(wanted, package)

    monkeypatch.setattr(importlib.util, "find_spec", lacking)
    if name == "numpy":
        machine.versions()
    (problem,) = _problems()
    assert problem.startswith(f"{name} is not installed")
    assert f"pip install {name}" in problem


@pytest.mark.parametrize("function", ["find", "environment"])
def test_no_server(machine: _Machine, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """A server that is missing or does not fit is one problem among the others, not the end."""

    def refuse(*args: Any) -> Any:
        raise ServerError("no tritonserver was found. Install one.")

    monkeypatch.setattr(tritonserver, function, refuse)
    machine.shared_memory(1)
    first, second = _problems()
    assert first == "no tritonserver was found. Install one."
    assert "shared memory" in second


def test_shadowing_model(machine: _Machine, tmp_path: Path) -> None:
    """A model.py where the command runs is a problem; a folder of that name is none."""
    (tmp_path / "model.py").mkdir()
    assert _problems() == []
    (tmp_path / "model.py").rmdir()
    (tmp_path / "model.py").write_text("")
    (problem,) = _problems()
    assert "model.py in this folder shadows" in problem


def test_problems_add_up(machine: _Machine, tmp_path: Path) -> None:
    """Several problems are several sentences, each of one line."""
    machine.shared_memory(1)
    machine.versions(numpy="2.0.0")
    (tmp_path / "model.py").write_text("")
    problems = _problems()
    assert len(problems) == 3
    assert not any("\n" in one for one in problems)


# --- folders ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        pytest.param('backend: "pytorch_py"\n', False, id="backend"),
        pytest.param('max_batch_size: 8 backend : "pytorch_py"', False, id="spaces"),
        pytest.param('platform: "pytorch_libtorch"\n', True, id="platform"),
        pytest.param(b"max_batch_size: 8 # caf\xe9\n", False, id="not-utf-8"),
        pytest.param('backend: "pytorch_py" inputs [{ }]', False, id="parse-error"),
    ],
)
def test_folder_without_a_backend(tmp_path: Path, text: str | bytes, noted: bool) -> None:
    """A platform without `backend` is noted; nothing is said about a config that is unreadable."""
    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "config.pbtxt").write_bytes(text.encode() if isinstance(text, str) else text)
    notes = list(preflight.folder_problems(folder))
    assert len(notes) == noted
    assert all(note.startswith("digits: ") and '"pytorch_py"' in note for note in notes)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        pytest.param('backend: "pytorch_py"', "", id="ours"),
        pytest.param('backend: "pytorch"', "", id="drop-in"),
        pytest.param('platform: "pytorch_libtorch"', "", id="platform"),
        pytest.param('platform: "torch_aoti"', "", id="aoti"),
        pytest.param('backend: "python"', "python", id="python"),
        pytest.param('backend: "onnxruntime"', "onnxruntime", id="onnxruntime"),
        pytest.param('backend: "my_pytorch"', "my_pytorch", id="name-of-choice"),
        pytest.param('platform: "ensemble"', "ensemble", id="ensemble"),
        pytest.param('platform: "tensorrt_plan"', "tensorrt_plan", id="tensorrt"),
    ],
)
def test_backend(tmp_path: Path, text: str, other: str) -> None:
    """A model is served by this backend, or by the one that its config names."""
    (tmp_path / "config.pbtxt").write_text(text)
    assert preflight.other_backend(tmp_path, pbtxt.read(tmp_path)) == other


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param('backend: "pytorch-py"', "Did you mean pytorch_py?", id="hyphen"),
        pytest.param('backend: "pytorchpy"', "Did you mean pytorch_py?", id="joined"),
        pytest.param('backend: "PyTorch_Py"', "Did you mean pytorch_py?", id="capitals"),
        pytest.param('backend: "torch_py"', "Did you mean pytorch_py?", id="shorter"),
        pytest.param('backend: "pytroch"', "Did you mean pytorch?", id="transposed"),
        pytest.param(
            'platform: "pytorch_libtroch"', "Did you mean pytorch_libtorch?", id="platform"
        ),
        pytest.param('name: "digits"', "config.pbtxt has no `backend`", id="none"),
        pytest.param('# backend: "pytorch_py"', "config.pbtxt has no `backend`", id="comment"),
        pytest.param("", "config.pbtxt has no `backend`", id="empty"),
        pytest.param(
            'parameters { key: "note" value { string_value: "backend: none" } }',
            "config.pbtxt has no `backend`",
            id="inside-a-string",
        ),
        pytest.param(None, "config.pbtxt is missing", id="no-config"),
    ],
)
def test_backend_that_no_server_has(tmp_path: Path, text: str | None, says: str) -> None:
    """A misspelt or missing backend is refused, with what to write instead."""
    if text is not None:
        (tmp_path / "config.pbtxt").write_text(text)
    with pytest.raises(ConfigError) as refusal:
        preflight.other_backend(tmp_path, pbtxt.read(tmp_path))
    assert says in str(refusal.value)
    assert "pytorch" in str(refusal.value)


def test_environment_of_a_models_own(tmp_path: Path) -> None:
    """Whoever reads of a package that is missing is told that its environment was not looked at."""
    folder = tmp_path / "digits"
    folder.mkdir()
    named = f'key: "{execution_env.KEY}" value {{ string_value: "/env.tar.gz" }}'
    (folder / "config.pbtxt").write_text(f'backend: "pytorch_py" parameters {{ {named} }}')
    (note,) = preflight.folder_problems(folder)
    assert execution_env.KEY in note
    assert sys.prefix in note


def test_closed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that this user cannot read is one note, and nothing in it is opened."""
    folder = tmp_path / "digits"
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    (note,) = preflight.folder_problems(folder)
    assert note == f"{folder} cannot be read by this user."


@pytest.mark.parametrize(
    ("groups", "noted"),
    [
        pytest.param([("KIND_GPU", 1)], True, id="one"),
        pytest.param([("KIND_GPU", 2)], False, id="two"),
        pytest.param([("KIND_CPU", 1)], False, id="no GPU"),
        pytest.param([("KIND_CPU", 2), ("KIND_GPU", 1)], True, id="both"),
    ],
)
def test_hooks_before_an_idle_gpu(groups: list[tuple[str, int]], noted: bool) -> None:
    """What would run while hooks do is pointed out where no other instance is there to do so."""
    document = {"instance_group": [{"kind": kind, "count": count} for kind, count in groups]}

    found = list(preflight.idle_gpu_notes(document))

    assert len(found) == noted
    assert all("count: 2" in one for one in found)
