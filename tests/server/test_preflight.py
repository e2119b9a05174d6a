"""Problems of a machine or a model folder before a server starts."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from torch_py_backend.config import execution_env, pbtxt
from torch_py_backend.errors import ConfigError, ToolError
from torch_py_backend.server import preflight, triton_installation
from torch_py_backend.server.triton_installation import TritonInstallation

_WHEEL = Path("/venv/lib/python3.11/site-packages/pytriton/tritonserver/bin/tritonserver")
_NGC = Path("/opt/tritonserver/bin/tritonserver")


def _raise(error: Exception) -> None:
    raise error


def _triton(executable: Path, backends: Path = Path("/backends")) -> TritonInstallation:
    return TritonInstallation(executable, backends / "python", Path("/stub"), ())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine without problems, which tests patch, and an empty current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(triton_installation, "find", lambda: _triton(_WHEEL))
    monkeypatch.setattr(triton_installation, "environment", lambda triton: {})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=256 << 20))
    monkeypatch.setattr(metadata, "version", {"numpy": "1.26.4"}.__getitem__)
    return monkeypatch


def _numpy(executable: Path, version: str) -> Callable[[pytest.MonkeyPatch], object]:
    def patch(machine: pytest.MonkeyPatch) -> None:
        machine.setattr(triton_installation, "find", lambda: _triton(executable))
        machine.setattr(metadata, "version", {"numpy": version}.__getitem__)

    return patch


def _lacks(name: str) -> Callable[[pytest.MonkeyPatch], object]:
    find = importlib.util.find_spec
    return lambda machine: machine.setattr(
        importlib.util, "find_spec", lambda module: None if module == name else find(module)
    )


def _fails(function: str) -> Callable[[pytest.MonkeyPatch], object]:
    error = ToolError("no tritonserver was found. Install one.")
    return lambda machine: machine.setattr(triton_installation, function, lambda *_: _raise(error))


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        (lambda _: None, None),
        (_numpy(_WHEEL, "2.0.0"), "numpy 2.0.0 garbles tensors .*'numpy<2'"),
        (_numpy(_WHEEL, "10.1"), "numpy 10.1 garbles tensors"),
        (_numpy(_NGC, "2.3.1"), None),
        (_lacks("torch"), "^torch is not installed in this Python; pip install torch.$"),
        (_lacks("numpy"), "^numpy is not installed in this Python; pip install numpy.$"),
        (_lacks("safetensors"), "^safetensors is not installed"),
        (_fails("find"), "^no tritonserver was found. Install one.$"),
        (_fails("environment"), "^no tritonserver was found. Install one.$"),
        (
            lambda machine: machine.setattr(
                shutil, "disk_usage", lambda path: SimpleNamespace(total=(256 << 20) - 1)
            ),
            "has 255 MB.*--shm-size",
        ),
        (lambda _: Path("model.py").mkdir(), None),
        (lambda _: Path("model.py").touch(), "model.py in this folder shadows"),
    ],
)
def test_machine_problems(
    patch: Callable[[pytest.MonkeyPatch], object], says: str | None, machine: pytest.MonkeyPatch
) -> None:
    """Each problem is one sentence with its cure."""
    patch(machine)
    problems = list(preflight.machine_problems())
    assert len(problems) == (says is not None)
    assert all(re.search(str(says), problem) for problem in problems)


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


def test_closed_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that this user cannot read is one note, and nothing in it is opened."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    (note,) = preflight.folder_problems(folder)
    assert note == f"{folder} cannot be read by this user."


@pytest.mark.parametrize(
    ("text", "other", "says"),
    [
        ('backend: "pytorch_py"', "", ""),
        ('backend: "pytorch"', "", ""),
        ('platform: "pytorch_libtorch"', "", ""),
        ('platform: "torch_aoti"', "", ""),
        ('backend: "python"', "python", ""),
        ('backend: "my_pytorch"', "my_pytorch", ""),
        ('platform: "ensemble"', "ensemble", ""),
        ('backend: "PyTorch-Py"', None, "Did you mean pytorch_py?"),
        ('backend: "pytroch"', None, "Did you mean pytorch?"),
        ('backend: "torch-py-backend"', None, "Did you mean pytorch_py?"),
        ('platform: "pytorch_libtroch"', None, "Did you mean pytorch_libtorch?"),
        ('name: "digits"', None, 'no `backend`; expected the line backend: "pytorch_py"'),
        (None, None, 'config.pbtxt is missing; expected the line backend: "pytorch_py"'),
    ],
)
def test_backend(folder: Path, text: str | None, other: str | None, says: str) -> None:
    """A model is served by this backend, or by the one that its config names.

    A misspelt or missing backend is refused, with what to write instead.
    """
    if text is not None:
        (folder / "config.pbtxt").write_text(text)
    document = pbtxt.read(folder)
    if other is not None:
        assert preflight.other_backend(folder, document) == other
        return
    with pytest.raises(ConfigError, match=re.escape(says)):
        preflight.other_backend(folder, document)
