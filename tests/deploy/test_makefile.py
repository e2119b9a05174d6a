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
_FROM_CPU_INDEX = f"--no-deps --index-url {_CPU} --constraint constraints.txt torch\n"
_GPU = shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


def _make(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run make with a script as Python, for an environment in this folder."""
    python = folder / "python"
    python.write_text(script)
    python.chmod(0o755)
    return subprocess.run(
        ["make", *words, f"PYTHON={python}", f"VENV={folder / 'environment'}"],
        cwd=_ROOT,
        # Without the variables of a surrounding make, which are in MAKEFLAGS.
        env={"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("version_info", "is missing or older than 3.10. Name another one: make demo PYTHON="),
        ("ensurepip", "cannot make virtual environments. Install python3-venv"),
    ],
)
def test_python_is_checked(part: str, says: str, tmp_path: Path) -> None:
    """A Python that cannot be used is named with the cure, and no environment is left."""
    done = _make(tmp_path, _FAILS.format(part=part, python=sys.executable), "demo")
    assert done.returncode == 2
    assert says in done.stdout
    assert not (tmp_path / "environment").exists()


@pytest.mark.skipif(_GPU, reason="has a GPU")
@pytest.mark.parametrize(
    ("variable", "settings", "cpu"),
    [
        ("WORKERS=1", "", True),
        ("PIP_ARGS=--index-url https://pypi.org/simple", "", False),
        ("TORCH_INDEX=", "", False),
        ("WORKERS=1", "global.index-url='https://mirror.example/simple'", False),
    ],
)
def test_torch_for_the_cpu(variable: str, settings: str, cpu: bool, tmp_path: Path) -> None:
    """Without a GPU, a CPU build is tried first, unless variables or pip's settings decide.

    The CPU build's index fails here: the default build is installed then.
    """
    log = tmp_path / "log"
    script = _RECORDS.format(python=sys.executable, log=log, settings=settings, fails=_CPU)
    done = _make(tmp_path, script, f"{tmp_path / 'environment'}/demo", variable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (_FROM_CPU_INDEX in log.read_text()) is cpu
    assert log.read_text().endswith("--editable .[demo]\n")
