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
from torch_py_backend.server import preflight, tritonserver

_HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


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


@pytest.mark.parametrize("value", ["", "$$TRITON_MODEL_DIRECTORY/env.tar.gz", "{}/env"])
def test_environment_for_the_stubs_python(value: str, tmp_path: Path) -> None:
    """No environment, and an archive or folder for the stub's Python, are accepted."""
    _archive(tmp_path / "env.tar.gz", "bin/activate", "lib/python3.12/os.py", "lib/python3.9/x.py")
    _folder(tmp_path / "env", "3.12")
    execution_env.check(tmp_path, _document(value.format(tmp_path)), "3.12")


@pytest.mark.parametrize("name", ["env.tar.gz", "env"])
def test_environment_for_another_python(name: str, tmp_path: Path) -> None:
    """The error has both versions and both cures; without a stub there is no check."""
    _archive(tmp_path / "env.tar.gz", "./lib/python3.12/os.py")
    _folder(tmp_path / "env", "3.12")
    document = _document(f"{execution_env.MODEL_FOLDER}/{name}")
    with pytest.raises(PlatformError) as refusal:
        execution_env.check(tmp_path, document, "3.11")
    for part in ("model 'net'", "Python 3.12", "Python 3.11", "triton_python_backend_stub"):
        assert part in str(refusal.value)
    execution_env.check(tmp_path, document, "")


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
        execution_env.check(tmp_path, _document(f"{execution_env.MODEL_FOLDER}/{name}"), "3.12")
    assert message in str(refusal.value)
    assert "torch-py-backend pack" in str(refusal.value)


@pytest.mark.parametrize("found", [True, False], ids=["a server", "no server"])
def test_check_uses_the_installed_server(
    found: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`check` compares with the stub of this machine's server, if there is one."""

    def find() -> tritonserver.TritonInstallation:
        if not found:
            raise ServerError("there is none.")
        return tritonserver.TritonInstallation(Path(), Path(), tmp_path / "stub", ())

    (tmp_path / "stub").write_bytes(b"\x7fELF libpython3.8.so.1.0\0")
    monkeypatch.setattr(tritonserver, "find", find)
    document = _document(str(_folder(tmp_path / "env", "3.12")))
    if not found:
        preflight.check_execution_environment(tmp_path, document)
        return
    with pytest.raises(PlatformError, match=r"for Python 3\.12.*runs Python 3\.8"):
        preflight.check_execution_environment(tmp_path, document)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot read"), (b"#!/bin/sh\n", "names no libpython")]
)
def test_invalid_stub(content: bytes | None, message: str, tmp_path: Path) -> None:
    """A stub that cannot be read, or loads no Python, is a ServerError."""
    stub = tmp_path / "stub"
    if content is not None:
        stub.write_bytes(content)
    with pytest.raises(ServerError, match=message):
        tritonserver.stub_python(tritonserver.TritonInstallation(Path(), Path(), stub, ()))


# --- in the stub -----------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a stub that was started through bin/activate of an environment for Python 3.99."""
    folder = _folder(tmp_path / "env", "3.99")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_stub_in_an_environment_for_another_python(
    started: Path, process: None, tmp_path: Path
) -> None:
    """The load fails with both versions, during completion and during the load."""
    message = rf"environment for Python 3\.99, and the server's stub runs Python {_HERE}"
    parameters = {execution_env.KEY: {"string_value": "env.tar.gz"}}
    arguments = build.arguments(parameters=parameters)
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
    if python is not None:
        monkeypatch.setenv("PATH", str(_folder(tmp_path / "env", python) / "bin"))
    else:
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    execution_env.check_running_python("net", named)
