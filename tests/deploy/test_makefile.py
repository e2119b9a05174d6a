"""What `make` checks before it installs anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FAILS = """#!/bin/sh
case "$2" in *{part}*) exit 1;; *) exec {python} "$@";; esac
"""


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
