"""EXECUTION_ENV_PATH: the version of Python of the environment that a config names."""

from __future__ import annotations

import io
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import build
import fake_triton
import pytest

from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.config import execution_env
from torch_py_backend.errors import PlatformError, ServerError
from torch_py_backend.server import preflight, triton_installation

_HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
_IN_FOLDER = execution_env.MODEL_FOLDER


def _document(value: str) -> dict[str, Any]:
    parameters = {execution_env.KEY: {"string_value": value}} if value else {}
    return {"name": "net", "parameters": parameters}


def _archive(path: Path, *names: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    return path


def _folder(path: Path, python: str) -> Path:
    (path / "lib" / f"python{python}" / "site-packages").mkdir(parents=True)
    (path / "bin").mkdir()
    return path


# --- before a server is started --------------------------------------------------------------


@pytest.mark.parametrize("value", ["", f"{_IN_FOLDER}/env.tar.gz", "{}/env"])
def test_environment(value: str, tmp_path: Path) -> None:
    """Without one, or for the stub's Python, the check passes; else it has both versions."""
    names = ("bin/activate", "./lib/python3.12/os.py", "lib/python3.9/x.py")
    _archive(tmp_path / "env.tar.gz", *names)
    _folder(tmp_path / "env", "3.12")
    document = _document(value.format(tmp_path))
    execution_env.check(tmp_path, document, "3.12")
    execution_env.check(tmp_path, document, "")  # the server's stub is unknown
    if value:
        with pytest.raises(PlatformError, match=r"'net'.* 3\.12.* 3\.11.*triton_python_backend_st"):
            execution_env.check(tmp_path, document, "3.11")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.tar.gz", "cannot be read: [Errno 2]"),
        ("half.tar.gz", "cannot be read: "),
        ("empty.tar.gz", "contains no lib/python3.*"),
        ("folder", "contains no lib/python3.*"),
    ],
)
def test_invalid_environment(name: str, message: str, tmp_path: Path) -> None:
    """A path that is unreadable or contains no Python is rejected."""
    archive = _archive(tmp_path / "empty.tar.gz", "bin/activate", "library/python3.12/os.py")
    (tmp_path / "half.tar.gz").write_bytes(archive.read_bytes()[:40])
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlatformError) as refusal:
        execution_env.check(tmp_path, _document(f"{_IN_FOLDER}/{name}"), "3.12")
    assert message in str(refusal.value)
    assert "conda-pack" in str(refusal.value)


def test_check_uses_the_installed_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`check` compares with the stub of this machine's server, if there is one."""

    def no_server() -> triton_installation.TritonInstallation:
        raise ServerError("there is none.")

    document = _document(str(_folder(tmp_path / "env", "3.12")))
    (tmp_path / "stub").write_bytes(b"\x7fELF libpython3.8.so.1.0\0")
    installed = triton_installation.TritonInstallation(Path(), Path(), tmp_path / "stub", ())
    monkeypatch.setattr(triton_installation, "find", no_server)
    preflight.check_execution_environment(tmp_path, document)
    monkeypatch.setattr(triton_installation, "find", lambda: installed)
    with pytest.raises(PlatformError, match=r"for Python 3\.12.*runs Python 3\.8"):
        preflight.check_execution_environment(tmp_path, document)


def test_invalid_stub(tmp_path: Path) -> None:
    """A stub that cannot be read, or loads no Python, is a ServerError."""
    installed = triton_installation.TritonInstallation(Path(), Path(), tmp_path / "stub", ())
    with pytest.raises(ServerError, match="cannot read"):
        triton_installation.stub_python(installed)
    (tmp_path / "stub").write_bytes(b"#!/bin/sh\n")
    with pytest.raises(ServerError, match="names no libpython"):
        triton_installation.stub_python(installed)


# --- in the stub -----------------------------------------------------------------------------


def test_stub_in_an_environment_for_another_python(
    process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The load fails with both versions, during completion and during the load."""
    folder = _folder(tmp_path / "env", "3.99")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    message = rf"environment for Python 3\.99, and the server's stub runs Python {_HERE}"
    arguments = build.arguments(parameters=_document("env.tar.gz")["parameters"])
    model = TritonPythonModel()
    with pytest.raises(fake_triton.TritonModelException, match=message):
        fake_triton.completed(model, arguments)
    with pytest.raises(fake_triton.TritonModelException, match=message):
        model.initialize(arguments)


@pytest.mark.parametrize(
    ("named", "python"), [("", "3.99"), ("env.tar.gz", _HERE), ("env.tar.gz", None)]
)
def test_stub_in_a_valid_environment(
    named: str, python: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No environment, one for this Python, and a PATH without one are accepted."""
    folder = _folder(tmp_path / "env", python) if python else tmp_path
    monkeypatch.setenv("PATH", str(folder / "bin"))
    execution_env.check_running_python("net", named)
