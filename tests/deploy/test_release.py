"""What is released: wheel and sdist, built; its version and changelog."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from build import files_in

import torch_py_backend

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "src" / "torch_py_backend"
_VERSION = torch_py_backend.__version__
_NAME = f"torch_py_backend-{_VERSION}"


def test_what_make_release_builds(tmp_path: Path) -> None:
    """An sdist, and a wheel from it that holds the package, byte for byte.

    The sdist has what tests the package, its documents, and what the image is built from.
    """
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    command += [str(tmp_path), str(_ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(tmp_path / f"{_NAME}-py3-none-any.whl") as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    told = {name for name in files if name.startswith(f"{_NAME}.dist-info/")}
    packaged = {f"torch_py_backend/{name}": data for name, data in files_in(_PACKAGE).items()}
    assert {name: data for name, data in files.items() if name not in told} == packaged
    assert "torch_py_backend/py.typed" in files
    assert f"{_NAME}.dist-info/licenses/LICENSE" in told
    metadata = email.message_from_bytes(files[f"{_NAME}.dist-info/METADATA"])
    assert metadata["Version"] == _VERSION
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"serve", "server", "tracing"} <= set(metadata.get_all("Provides-Extra") or ())
    with tarfile.open(tmp_path / f"{_NAME}.tar.gz") as sdist:
        names = {name.removeprefix(f"{_NAME}/") for name in sdist.getnames()}
    for name in ("tests/conftest.py", "docs/models.md", "docker/Dockerfile", "Makefile", "LICENSE"):
        assert name in names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".git/")]


def test_changelog() -> None:
    """The newest version is the package's, and only that may be unreleased."""
    text = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest, *older = re.findall(r"^## \[([\w.]+)\] - (?:[\d-]{10}|unreleased)$", text, re.MULTILINE)
    assert newest == _VERSION
    assert "unreleased" not in text.partition(f"## [{older[0]}]" if older else "\0")[2]
