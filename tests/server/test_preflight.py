"""Problems of a machine or a model folder before a server starts."""

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
from torch_py_backend.errors import ConfigError, ToolError
from torch_py_backend.server import preflight, triton_installation
from torch_py_backend.server.triton_installation import TritonInstallation

_WHEEL = Path("/venv/lib/python3.11/site-packages/pytriton/tritonserver/bin/tritonserver")
_NGC = Path("/opt/tritonserver/bin/tritonserver")


class _Machine:
    """A machine without problems, which tests add."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.server(_WHEEL)
        self.shared_memory(1 << 30)
        self.versions(numpy="1.26.4")
        monkeypatch.setattr(triton_installation, "environment", lambda triton: {})

    def server(self, executable: Path) -> None:
        triton = TritonInstallation(executable, Path("/backend"), Path("/stub"), ())
        self._patch.setattr(triton_installation, "find", lambda: triton)

    def shared_memory(self, size: int) -> None:
        usage = {"/dev/shm": SimpleNamespace(total=size, used=0, free=size)}
        self._patch.setattr(shutil, "disk_usage", lambda path: usage[str(path)])

    def versions(self, **versions: str) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        self._patch.setattr(metadata, "version", version)

    @property
    def problems(self) -> list[str]:
        return list(preflight.machine_problems())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Machine:
    """A machine without problems, and an empty current folder."""
    monkeypatch.chdir(tmp_path)
    return _Machine(monkeypatch)


def test_small_shared_memory(machine: _Machine) -> None:
    """Less than 256 MB is a problem; a container gets more with --shm-size."""
    machine.shared_memory(256 << 20)
    assert machine.problems == []
    machine.shared_memory((256 << 20) - 1)
    (problem,) = machine.problems
    assert "has 255 MB" in problem
    assert "--shm-size" in problem


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
    assert len(machine.problems) == count
    assert all(f"numpy {version}" in text and "'numpy<2'" in text for text in machine.problems)


@pytest.mark.parametrize("name", ["torch", "numpy", "safetensors"])
def test_missing_package(machine: _Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A package that the backend needs, and this Python lacks, is named with its cure."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda module, package=None: None if module == name else find(module, package),
    )
    if name == "numpy":
        machine.versions()
    assert machine.problems == [f"{name} is not installed in this Python; pip install {name}."]


@pytest.mark.parametrize("function", ["find", "environment"])
def test_no_server(machine: _Machine, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """A server that is missing or unusable is one problem among others."""

    def refuse(*args: Any) -> Any:
        raise ToolError("no tritonserver was found. Install one.")

    monkeypatch.setattr(triton_installation, function, refuse)
    machine.shared_memory(1)
    first, second = machine.problems
    assert first == "no tritonserver was found. Install one."
    assert "shared memory" in second


def test_shadowing_model(machine: _Machine, tmp_path: Path) -> None:
    """A model.py where the command runs is a problem; a folder of that name is none."""
    (tmp_path / "model.py").mkdir()
    assert machine.problems == []
    (tmp_path / "model.py").rmdir()
    (tmp_path / "model.py").write_text("")
    (problem,) = machine.problems
    assert "model.py in this folder shadows" in problem


# --- folders ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "digits"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(b'backend: "pytorch_py"\n', [], id="backend"),
        pytest.param(b"max_batch_size: 8 # caf\xe9\n", [], id="not-utf-8"),
        pytest.param(b'backend: "pytorch_py" inputs [{ }]', [], id="parse-error"),
        pytest.param(
            b'backend: "pytorch_py" parameters { key: "%s" value { string_value: "/env.tar.gz" } }'
            % execution_env.KEY.encode(),
            ["digits: ", execution_env.KEY, sys.prefix],
            id="environment",
        ),
    ],
)
def test_folder_problems(folder: Path, text: bytes, says: list[str]) -> None:
    """An environment of the model's own is noted.

    Nothing is said about a config that is unreadable.
    """
    (folder / "config.pbtxt").write_bytes(text)
    notes = list(preflight.folder_problems(folder))
    assert len(notes) == bool(says)
    assert all(part in note for note in notes for part in says)


def test_names_beyond_ascii(folder: Path) -> None:
    """Files that Python in an older stub cannot open are noted."""
    (folder / "config.pbtxt").write_text('backend: "pytorch_py"\n')
    (folder / "1" / "données").mkdir(parents=True)
    (folder / "1" / "слова.txt").touch()
    (note,) = preflight.folder_problems(folder)
    assert note.startswith("digits: 1/données, 1/слова.txt: Python in the stub of Triton 24.10")


def test_closed_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that this user cannot read is one note, and nothing in it is opened."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    (note,) = preflight.folder_problems(folder)
    assert note == f"{folder} cannot be read by this user."


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ('backend: "pytorch_py"', ""),
        ('backend: "pytorch"', ""),
        ('platform: "pytorch_libtorch"', ""),
        ('platform: "torch_aoti"', ""),
        ('backend: "python"', "python"),
        ('backend: "my_pytorch"', "my_pytorch"),
        ('platform: "ensemble"', "ensemble"),
    ],
)
def test_backend(folder: Path, text: str, other: str) -> None:
    """A model is served by this backend, or by the one that its config names."""
    (folder / "config.pbtxt").write_text(text)
    assert preflight.other_backend(folder, pbtxt.read(folder)) == other


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('backend: "PyTorch-Py"', "Did you mean pytorch_py?"),
        ('backend: "pytroch"', "Did you mean pytorch?"),
        ('backend: "torch-py-backend"', "Did you mean pytorch_py?"),
        ('platform: "pytorch_libtroch"', "Did you mean pytorch_libtorch?"),
        ('name: "digits"', "config.pbtxt has no `backend`"),
        (None, "config.pbtxt is missing"),
    ],
)
def test_backend_that_no_server_has(folder: Path, text: str | None, says: str) -> None:
    """A misspelt or missing backend is refused, with what to write instead."""
    if text is not None:
        (folder / "config.pbtxt").write_text(text)
    with pytest.raises(ConfigError) as refusal:
        preflight.other_backend(folder, pbtxt.read(folder))
    assert says in str(refusal.value)
    assert "pytorch" in str(refusal.value)


@pytest.mark.parametrize("text", ['backend: "pytorch"', 'platform: "pytorch_libtorch"'])
def test_backend_that_is_installed_as_pytorch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A server with this backend in place of LibTorch's serves its configs; others do not."""
    backends = folder.parent / "backends"
    triton = TritonInstallation(_NGC, backends / "python", folder, ())
    monkeypatch.setattr(triton_installation, "find", lambda: triton)
    (folder / "config.pbtxt").write_text(text)
    with pytest.raises(ConfigError, match="which `serve` does not have"):
        preflight.check_server(folder, pbtxt.read(folder))
    (backends / "pytorch").mkdir(parents=True)
    (backends / "pytorch" / "model.py").write_text("")
    preflight.check_server(folder, pbtxt.read(folder))
