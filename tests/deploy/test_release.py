"""What is released: wheel and sdist, built and installed; its version, changelog and workflow."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

import packed
import pytest
import yaml

import torch_py_backend

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "src" / "torch_py_backend"
_VERSION = torch_py_backend.__version__
_NAME = f"torch_py_backend-{_VERSION}"
_PROJECT = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Built:
    """The files of a release, and the wheel that the tree itself makes."""

    wheel: Path
    sdist: Path
    from_tree: Path

    @property
    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as wheel:
            return email.message_from_bytes(wheel.read(f"{_NAME}.dist-info/METADATA"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """What `make release` builds, an sdist and a wheel from it; and a wheel from the tree."""
    release, tree = tmp_path_factory.mktemp("release"), tmp_path_factory.mktemp("tree")
    _run("build", "--no-isolation", "--outdir", str(release), str(_ROOT))
    _run("build", "--no-isolation", "--wheel", "--outdir", str(tree), str(_ROOT))
    wheel = f"{_NAME}-py3-none-any.whl"
    return Built(release / wheel, release / f"{_NAME}.tar.gz", tree / wheel)


def _run(module: str, *arguments: str) -> None:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


# --- wheel and sdist -------------------------------------------------------------------------


def test_package_index_takes_it(built: Built) -> None:
    """`twine check` finds nothing to warn about: the README can be shown."""
    _run("twine", "check", "--strict", str(built.wheel), str(built.sdist))


def test_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    """Every module, the mark that it is typed, and the licence; no tests, no caches."""
    names = set(_contents(built.wheel))
    told = {name for name in names if name.startswith(f"{_NAME}.dist-info/")}
    package = {
        f"torch_py_backend/{one.relative_to(_PACKAGE)}"
        for one in _PACKAGE.rglob("*")
        if one.is_file() and "__pycache__" not in one.parts
    }
    assert names - told == package
    assert "torch_py_backend/py.typed" in package
    assert f"{_NAME}.dist-info/licenses/LICENSE" in told


def test_sdist_makes_the_same_wheel(built: Built) -> None:
    """What is built from the sdist is what is built from the tree, byte for byte."""
    assert _contents(built.wheel) == _contents(built.from_tree)


def test_sdist_holds_what_tests_it(built: Built) -> None:
    """Who has the sdist can run the tests, read the documents, and build the image."""
    with tarfile.open(built.sdist) as opened:
        names = {name.removeprefix(f"{_NAME}/") for name in opened.getnames()}
    for name in ("tests/conftest.py", "docs/models.md", "docker/Dockerfile", "Makefile", "LICENSE"):
        assert name in names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".git/")]


def test_metadata(built: Built) -> None:
    """Version, licence and Pythons stand in what an index shows."""
    told = built.metadata
    assert told["Version"] == _VERSION
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Requires-Python"] == ">=3.10"
    assert {"server", "tune", "tracing"} <= set(told.get_all("Provides-Extra") or ())


# --- installed -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Image:
    """A scratch tree laid out like NVIDIA's image, with the wheel installed."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "python" / "bin" / "python"

    @property
    def backends(self) -> Path:
        return self.root / "opt" / "tritonserver" / "backends"

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command there, with nothing of where the tests run."""
        values = {"PATH": f"{self.python.parent}:/usr/bin:/bin"}
        return subprocess.run(
            command, cwd=self.root, env=values, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module")
def image(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The wheel in a fresh Python beside a tritonserver; what it depends on is there already."""
    root = tmp_path_factory.mktemp("image")
    packed.make(root / "python", names={})
    packed.borrow(root / "python")
    triton_s = root / "opt" / "tritonserver" / "backends" / "python"
    triton_s.mkdir(parents=True)
    (triton_s / "libtriton_python.so").touch()
    image = Image(root)
    pip = ["--python", str(image.python), "install", "--quiet", "--no-deps", "--no-index"]
    _run("pip", *pip, str(built.wheel))
    return image


def test_installed_wheel_puts_the_backend_into_a_bare_tree(image: Image) -> None:
    """`torch-py-backend install` works from the wheel alone, and writes the whole package."""
    where = image.run("python", "-c", "import torch_py_backend as t; print(t.__file__)")
    assert where.stdout.startswith(str(image.root)), where.stderr
    done = image.run("torch-py-backend", "install", f"--backend-dir={image.backends}")
    assert done.returncode == 0, done.stderr
    folder = image.backends / "pytorch_py"
    assert done.stdout == f"installed {folder}\n"
    shim = _ROOT / "backends" / "pytorch_py" / "model.py"
    assert (folder / "model.py").read_bytes() == shim.read_bytes()
    for one in _PACKAGE.rglob("*.py"):
        assert (folder / "torch_py_backend" / one.relative_to(_PACKAGE)).is_file()


# --- one version, one changelog, one way to test ---------------------------------------------


def test_version_stands_in_one_place() -> None:
    """The package's version is that of its `__init__`; what else tells one is made from it."""
    assert '\ndynamic = ["version"]\n' in _PROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?", _VERSION)


def test_changelog() -> None:
    """As Keep a Changelog has it: the newest version first, changes under the six headings."""
    text = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    newest, *older = [
        re.fullmatch(r"\[([\w.]+)\] - ([\d-]{10}|unreleased)", one) for one in headings
    ]
    assert newest is not None
    assert newest[1] == _VERSION
    assert all(one is not None and one[2] != "unreleased" for one in older), headings
    kinds = set(re.findall(r"^### (.*)$", text, flags=re.MULTILINE))
    assert kinds
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_workflow_is_what_runs_here() -> None:
    """GitHub runs .ci/run, and nothing beside it, on the Pythons that the package names."""
    workflow = yaml.safe_load((_ROOT / ".github/workflows/test.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [one["run"] for one in job["steps"] if "run" in one] == [".ci/run"]
    *run, newest = re.findall(r"Python :: (3\.\d+)", _PROJECT)
    assert job["strategy"]["matrix"]["python"] == run
    assert newest == "3.13"  # which the server in the wheel does not support
    assert "make test" in (_ROOT / ".ci/run").read_text()
