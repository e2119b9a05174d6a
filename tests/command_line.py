"""The command `torch-py-backend`, run in this process."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from torch_py_backend.cli import app


def run(
    *arguments: str, cwd: Path | None = None, terminal: io.TextIOWrapper | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command; return its exit code, and what it printed through Python's streams.

    A terminal takes standard output instead.
    """
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(terminal or out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["torch-py-backend", *arguments])
        patch.setenv("COLUMNS", "200")
        patch.setenv("TERM", "dumb")
        if cwd is not None:
            patch.chdir(cwd)
        try:
            app()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def fake_tritonserver(folder: Path, script: str = "", *, stub: bool = True) -> Path:
    """Write what NVIDIA's containers have of a tritonserver; return its executable."""
    python, executable = folder / "backends/python", folder / "bin/tritonserver"
    for path in (python, executable.parent):
        path.mkdir(parents=True)
    executable.write_text(script)
    executable.chmod(0o755)
    (python / "libtriton_python.so").touch()
    if stub:
        (python / "triton_python_backend_stub").touch()
    return executable
