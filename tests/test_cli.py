"""The command line: what it prints and how it exits; `tests/server/test_serve.py` runs servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_APP = "from torch_py_backend.cli import app; app()"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _APP, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "200", "TERM": "dumb"},
    )


def test_install_twice_and_uninstall(tmp_path: Path) -> None:
    """Installing may be repeated; removing leaves nothing."""
    for _ in range(2):
        done = _run("install", f"--backend-dir={tmp_path}")
        assert done.stdout == f"installed {tmp_path / 'pytorch_py'}\n"
        assert done.returncode == 0
    assert (tmp_path / "pytorch_py" / "model.py").is_file()
    done = _run("install", f"--backend-dir={tmp_path}", "--uninstall")
    assert done.stdout == f"removed {tmp_path / 'pytorch_py'}\n"
    assert list(tmp_path.iterdir()) == []
    done = _run("install", f"--backend-dir={tmp_path}", "--uninstall")
    assert "nothing to remove" in done.stdout
    assert done.returncode == 0


def test_drop_in_beside_the_libtorch_backend(tmp_path: Path) -> None:
    """Triton would prefer the library: one sentence, exit code 1, nothing written."""
    (tmp_path / "pytorch").mkdir()
    (tmp_path / "pytorch" / "libtriton_pytorch.so").write_bytes(b"")
    done = _run("install", f"--backend-dir={tmp_path}", "--name=pytorch")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "libtriton_pytorch.so" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["pytorch", "libtriton_pytorch.so"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "/no/such/repository"], "/no/such/repository is not a folder"),
        (["serve", ".", "--tritonserver=/no/server"], "/no/server is not a file"),
        (["install", "--backend-dir=/dev/null/x"], "cannot install into /dev/null/x"),
    ],
    ids=["repository", "server", "backend-dir"],
)
def test_refusals(arguments: list[str], says: str) -> None:
    """A refusal is one line on standard error and exit code 1."""
    done = _run(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_names_the_commands() -> None:
    """Help lists every command."""
    done = _run("--help")
    assert done.returncode == 0
    assert "serve" in done.stdout
    assert "install" in done.stdout
