"""Problems of a machine or a model folder before a server starts."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from torch_py_backend.config import execution_env, pbtxt
from torch_py_backend.errors import ConfigError
from torch_py_backend.server import preflight


def test_machine_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each problem is one sentence with its cure."""
    size = SimpleNamespace(total=256 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: size)
    assert list(preflight.machine_problems()) == []
    size.total -= 1
    monkeypatch.setattr(sys, "executable", "/none/python")
    python, memory = preflight.machine_problems()
    assert "Run from a virtual environment" in python
    assert re.search("has 255 MB.*--shm-size", memory)


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
