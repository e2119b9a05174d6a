"""The entry point of the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torch_py_backend import __version__


def test_module_is_the_command() -> None:
    """`python -m torch_py_backend` is `torch-py-backend`."""
    command = [sys.executable, "-m", "torch_py_backend", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"torch-py-backend {__version__}\n"


@pytest.mark.parametrize("package", ["typer", "rich", "psutil", "grpc"])
def test_without_the_packages_of_the_command_line(package: str) -> None:
    """The wheel alone serves models; its command names the extra to install."""
    code = (
        f"import sys; sys.modules[{package!r}] = None;"
        " from torch_py_backend.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"the package {package}, which is not installed" in done.stderr
    assert "pip install 'torch-py-backend[serve]'" in done.stderr
    assert "Traceback" not in done.stderr
