"""Finding a tritonserver, and what it needs to run this backend."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from torch_py_backend.errors import ToolError
from torch_py_backend.server import triton_installation


def _tree(folder: Path, *, stub: bool = True) -> Path:
    """A tritonserver as NVIDIA's containers have it; returns its executable."""
    for name in ("bin/tritonserver", "backends/python/libtriton_python.so"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
        (folder / name).chmod(0o755)
    if stub:
        (folder / "backends/python/triton_python_backend_stub").write_bytes(b"")
    return folder / "bin/tritonserver"


def test_order_of_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--tritonserver comes first, then PATH, then /opt/tritonserver, then the wheel."""
    named, on_path, container = (_tree(tmp_path / name) for name in ("named", "path", "ngc"))
    wheel = triton_installation.find()
    assert "pytriton" in wheel.executable.parts
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in wheel.stub.parts
    monkeypatch.setattr(triton_installation, "NGC", tmp_path / "ngc")
    assert triton_installation.find().executable == container
    monkeypatch.setenv("PATH", str(on_path.parent), prepend=os.pathsep)
    assert triton_installation.find().executable == on_path
    triton = triton_installation.find(named)
    assert triton.executable == named
    assert triton.python_backend == tmp_path / "named/backends/python"
    assert tmp_path / "named/lib" in triton.libraries


def test_a_server_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what is missing; without any server, the extra to install."""
    with pytest.raises(ToolError, match="is not a file"):
        triton_installation.find(tmp_path / "nothing")
    with pytest.raises(ToolError, match="does not support Python"):
        triton_installation.find(_tree(tmp_path, stub=False))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(triton_installation, "NGC", tmp_path / "none")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolError, match=r"pip install 'torch-py-backend\[server\]'"):
        triton_installation.find()


def test_environment_leads_to_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's stub runs the first python3 on PATH: a Python without one beside it is refused."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    triton = triton_installation.find()
    values = triton_installation.environment(triton)
    first = Path(values["PATH"].split(os.pathsep)[0])
    assert (first / "python3").resolve() == Path(sys.executable).resolve()
    assert values["LD_LIBRARY_PATH"].endswith(f"{os.pathsep}/somewhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ToolError, match="is not this Python"):
        triton_installation.environment(triton)
