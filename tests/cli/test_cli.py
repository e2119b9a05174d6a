"""The command line: installing, removed names, and how errors are printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import refuse, run

from torch_py_backend import __version__


def test_module_is_the_command() -> None:
    """`python -m torch_py_backend` is `torch-py-backend`; its version is the package's."""
    command = [sys.executable, "-m", "torch_py_backend", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"torch-py-backend {__version__}\n"


@pytest.mark.parametrize("package", ["typer", "grpc"])
def test_without_the_packages_of_the_command_line(package: str) -> None:
    """The wheel alone serves models; its command names the extra to install."""
    code = (
        f"import sys; sys.modules[{package!r}] = None;"
        " from torch_py_backend.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"the package {package}, which is not installed" in done.stderr
    assert "pip install 'torch-py-backend[serve]'" in done.stderr
    assert "Traceback" not in done.stderr


# --- install ---------------------------------------------------------------------------------


def test_install_where_no_server_looks(tmp_path: Path) -> None:
    """A folder that is no backend directory is refused; with --create it is made and filled."""
    folder = tmp_path / "backends"
    text = "expected the backend directory of a tritonserver"
    refuse(text, "install", f"--backend-dir={folder}")
    folder.mkdir()
    refuse(text, "install", f"--backend-dir={folder}")
    assert list(tmp_path.rglob("*")) == [folder]
    folder.rmdir()
    done = run("install", f"--backend-dir={folder}", "--create")
    assert done.stdout == f"installed {folder / 'pytorch_py'}\n"
    assert (folder / "pytorch_py" / "model.py").is_file()


def test_install_beside_the_python_backend_and_uninstall(tmp_path: Path) -> None:
    """A backend directory has the Python backend; uninstall removes our folder only."""
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "libtriton_python.so").write_bytes(b"")
    option = f"--backend-dir={tmp_path}"
    assert run("install", option).returncode == 0
    assert run("install", option, "--uninstall").stdout == f"removed {tmp_path / 'pytorch_py'}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["python"]
    done = run("install", option, "--uninstall")
    assert (done.returncode, "nothing to remove" in done.stdout) == (0, True)


@pytest.mark.parametrize(
    "arguments",
    [("bench", "models", "net"), ("pack", "env"), ("serve", "models", "--poll=5")],
    ids=["bench", "pack", "--poll"],
)
def test_removed_names(arguments: tuple[str, ...]) -> None:
    """A command or flag of an earlier version is an error that says what to do instead."""
    refuse("was removed. ", *arguments)


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve", "/no/such/repository"], "/no/such/repository is not a folder"),
        (["serve", ".", "--tritonserver=/no/server"], "/no/server is not a file"),
        (
            ["serve", ".", "--allow-empty", "--http-port=99999"],
            "--http-port is 99999; expected a port from 0",
        ),
        (["serve", ".", "--", "--load-model=m"], "has no model 'm'; its models: "),
        (["install", "--backend-dir=/no/backends"], "/no/backends is not a folder; expected the"),
        (["install", "--backend-dir=/dev/null/x", "--create"], "cannot install into /dev/null/x"),
        (["check", "/dev/null"], "/dev/null is not a folder"),
        (["check", "/no/[extra]/[/x]"], "/no/[extra]/[/x] is not a folder"),
        (["init", "/no/such/model.pt"], "/no/such/model.pt is not there"),
        (["init", "/"], "/ is a folder without a config.json of transformers"),
    ],
    ids=" ".join,
)
def test_an_error_is_one_line_and_exit_code_1(arguments: list[str], text: str) -> None:
    refuse(text, *arguments)
