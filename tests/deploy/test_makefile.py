"""What `make` says before it installs anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FAILS = """#!/bin/sh
case "$2" in *{part}*) exit 1;; *) exec {python} "$@";; esac
"""


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
