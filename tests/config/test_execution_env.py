"""EXECUTION_ENV_PATH: the version of Python of the environment that a config names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import build
import fake_triton
import pytest

from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.config import execution_env
from torch_py_backend.errors import PlatformError

_HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def _folder(path: Path, python: str) -> Path:
    (path / "lib" / f"python{python}" / "site-packages").mkdir(parents=True)
    (path / "bin").mkdir()
    return path


def test_another_python_is_refused_in_completion_and_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = _folder(tmp_path / "env", "3.99")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    message = rf"environment for Python 3\.99, and the server's stub runs Python {_HERE}"
    arguments = build.arguments(parameters={execution_env.KEY: {"string_value": "env.tar.gz"}})
    model = TritonPythonModel()
    with pytest.raises(fake_triton.TritonModelException, match=message):
        fake_triton.completed(model, arguments)
    with pytest.raises(PlatformError, match=message):
        model._start(arguments)


@pytest.mark.parametrize(("is_named", "python"), [(False, "3.99"), (True, _HERE), (True, None)])
def test_no_environment_or_one_for_this_python(
    is_named: bool, python: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = _folder(tmp_path / "env", python) if python else tmp_path
    monkeypatch.setenv("PATH", str(folder / "bin"))
    execution_env.check_running_python(is_named=is_named)
