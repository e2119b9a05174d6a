"""What is released: wheel and sdist, built and installed; its version and changelog."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import packed
import pytest

import torch_py_backend

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "src" / "torch_py_backend"
_VERSION = torch_py_backend.__version__
_NAME = f"torch_py_backend-{_VERSION}"
_FILES = {
    f"torch_py_backend/{path.relative_to(_PACKAGE)}": path.read_bytes()
    for path in _PACKAGE.rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}


@dataclass(frozen=True)
class Built:
    """The files of a release."""

    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """What `make release` builds: an sdist, and a wheel from it."""
    folder = tmp_path_factory.mktemp("release")
    _run("build", "--no-isolation", "--outdir", str(folder), str(_ROOT))
    return Built(folder / f"{_NAME}-py3-none-any.whl", folder / f"{_NAME}.tar.gz")


def _run(module: str, *arguments: str) -> None:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel(built: Built) -> None:
    """The wheel from the sdist holds the package, byte for byte, its licence and nothing else."""
    with zipfile.ZipFile(built.wheel) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    told = {name for name in files if name.startswith(f"{_NAME}.dist-info/")}
    assert {name: data for name, data in files.items() if name not in told} == _FILES
    assert "torch_py_backend/py.typed" in files
    assert f"{_NAME}.dist-info/licenses/LICENSE" in told
    metadata = email.message_from_bytes(files[f"{_NAME}.dist-info/METADATA"])
    assert metadata["Version"] == _VERSION
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"serve", "server", "tracing"} <= set(metadata.get_all("Provides-Extra") or ())


def test_sdist(built: Built) -> None:
    """It has what tests the package, its documents, and what the image is built from."""
    with tarfile.open(built.sdist) as opened:
        names = {name.removeprefix(f"{_NAME}/") for name in opened.getnames()}
    for name in ("tests/conftest.py", "docs/models.md", "docker/Dockerfile", "Makefile", "LICENSE"):
        assert name in names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".git/")]


def test_installed_wheel_puts_the_backend_into_a_bare_tree(built: Built, tmp_path: Path) -> None:
    """`torch-py-backend install` works from the wheel alone, and writes the whole package."""
    environment = packed.make(tmp_path / "python")
    python = environment / "bin" / "python"
    pip = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    _run("pip", *pip, str(built.wheel))
    backends = tmp_path / "opt" / "tritonserver" / "backends"
    (backends / "python").mkdir(parents=True)
    (backends / "python" / "libtriton_python.so").touch()
    done = subprocess.run(
        [python.with_name("torch-py-backend"), "install", f"--backend-dir={backends}"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    folder = backends / "pytorch_py"
    assert done.stdout.startswith(f"installed {folder}\n"), done.stderr
    shim = _ROOT / "backends" / "pytorch_py" / "model.py"
    assert (folder / "model.py").read_bytes() == shim.read_bytes()
    for name, data in _FILES.items():
        assert (folder / name).read_bytes() == data


def test_changelog() -> None:
    """The newest version is the package's, and only that may be unreleased."""
    text = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest, *older = re.findall(r"^## \[([\w.]+)\] - (?:[\d-]{10}|unreleased)$", text, re.MULTILINE)
    assert newest == _VERSION
    assert "unreleased" not in text.partition(f"## [{older[0]}]" if older else "\0")[2]
