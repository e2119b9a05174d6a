"""What `make` checks before it installs anything, and which torch it installs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FAILS = """#!/bin/sh
case "$2" in *{part}*) exit 1;; *) exec {python} "$@";; esac
"""
# Makes environments whose Python is this file, and writes down what pip would install.
_RECORDS = """#!/bin/sh
case "$1 $2 $3" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip config") echo "{settings}" ;;
    "-m pip install") echo "$*" >> {log}; case "$*" in *{fails}*) exit 1 ;; esac ;;
    *) exec {python} "$@" ;;
esac
"""
_CPU = "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("version_info", "is missing or older than 3.10. Name another one: make demo PYTHON="),
        ("ensurepip", "cannot make virtual environments. Install python3-venv"),
    ],
)
def test_python_is_checked(part: str, says: str, tmp_path: Path) -> None:
    """A Python that cannot be used is named with the cure, and no environment is left."""
    python = tmp_path / "python"
    python.write_text(_FAILS.format(part=part, python=sys.executable))
    python.chmod(0o755)
    environment = tmp_path / "environment"
    done = subprocess.run(
        ["make", "--no-print-directory", "demo", f"PYTHON={python}", f"VENV={environment}"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert says in done.stdout
    assert not environment.exists()


def _installs(folder: Path, *variables: str, settings: str = "", fails: str = "nothing") -> str:
    """Install the demo with a Python that installs nothing; return the output and pip's calls."""
    python, log = folder / "python", folder / "log"
    python.write_text(
        _RECORDS.format(python=sys.executable, log=log, settings=settings, fails=fails)
    )
    python.chmod(0o755)
    environment = folder / "environment"
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["make", f"{environment}/demo", f"PYTHON={python}", f"VENV={environment}", *variables],
        cwd=_ROOT,
        # Variables of a surrounding make are in MAKEFLAGS.
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (environment / "demo").exists()
    return done.stdout + log.read_text()


_NO_GPU = pytest.mark.skipif(
    shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists(), reason="has a GPU"
)


_FROM_CPU_INDEX = f"--no-deps --index-url {_CPU} --constraint constraints.txt torch\n"
_DEMO = "install --constraint constraints.txt --editable .[demo]\n"


@_NO_GPU
@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("nothing", "No GPU: installing a CPU build of torch. PIP_ARGS="),
        (_CPU, f"No torch from {_CPU}: installing the default build."),
    ],
)
def test_torch_for_the_cpu(fails: str, says: str, tmp_path: Path) -> None:
    """Without a GPU, a CPU build is tried first; if its index fails, the default is installed."""
    text = _installs(tmp_path, fails=fails)
    assert says in text
    assert _FROM_CPU_INDEX in text
    assert text.endswith(_DEMO)


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        (["PIP_ARGS=--index-url https://pypi.org/simple"], ""),
        (["TORCH_INDEX="], ""),
        ([], "global.index-url='https://mirror.example/simple'"),
    ],
)
def test_torch_is_chosen(variables: list[str], settings: str, tmp_path: Path) -> None:
    """PIP_ARGS, an empty TORCH_INDEX, or an index in pip's settings decide about torch."""
    assert _CPU not in _installs(tmp_path, *variables, settings=settings)


def test_torch_for_a_gpu(tmp_path: Path) -> None:
    """With a GPU, the default build is installed."""
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    assert _CPU not in _installs(tmp_path)
