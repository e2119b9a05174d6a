"""Python environments are inspected, checked and packed; archives run as Triton starts them."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import packed
import pytest
from packed import PYTHON, SITE

from torch_py_backend.errors import ToolError
from torch_py_backend.tools import packing
from torch_py_backend.tools.packing import Environment

_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(scope="module", autouse=True)
def fast() -> Iterator[None]:
    """Compress little: most of the time would go there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_COMPRESSION", 1)
        yield


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that can be packed, with a package `extra` and a command."""
    folder = packed.make(tmp_path_factory.mktemp("sound") / "env")
    (folder / SITE / "extra.py").write_text("VALUE = 7\n")
    (folder.parent / "cached.py").write_text("CACHED = 1\n")
    (folder / SITE / "cached.py").symlink_to(folder.parent / "cached.py")
    (folder / SITE / "beside.py").symlink_to("extra.py")
    command = folder / "bin" / "extra"
    command.write_text(f"#!{folder}/bin/python\nimport extra\nprint(extra.VALUE)\n")
    command.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def archive(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That environment, packed."""
    path = tmp_path_factory.mktemp("archive") / "env.tar.gz"
    packing.write(packing.inspect(sound), path)
    return path


@pytest.fixture(scope="module")
def unpacked(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive, as Triton unpacks it."""
    return packed.unpack(archive, tmp_path_factory.mktemp("unpacked"))


# --- inspected, and checked ------------------------------------------------------------------


def test_inspect(tmp_path: Path) -> None:
    """An environment reports its type, Python and packages, and files that are elsewhere."""
    folder = packed.make(tmp_path / "env", layer=True)
    origin = {"url": "file:///home/me/mine", "dir_info": {"editable": True}}
    packed.install(folder, "mine", "1.0", origin)
    (folder / SITE / "outside.pth").write_text(f"{tmp_path}\n")
    environment = packing.inspect(folder)
    assert environment.kind == "layer"
    assert environment.python == PYTHON
    assert environment.packages["torch"] == "2.13.0+cpu"
    assert environment.base == sys.base_prefix
    assert {"mine", str(tmp_path)} <= set(environment.outside)
    packing.check(environment, PYTHON, numpy_1=True)  # a layer may have both


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (None, "is no environment: it has neither pyvenv.cfg nor conda-meta"),
        ((), "bin/python does not run: No such file"),
        (("echo no module named os >&2", "exit 1"), "does not run: no module named os"),
        (("exit 3",), "does not run: it printed no error"),
    ],
    ids=["no-environment", "no-python", "complains", "silent"],
)
def test_invalid_environments(lines: tuple[str, ...] | None, says: str, tmp_path: Path) -> None:
    """A folder that is no environment, or whose Python does not run, is refused."""
    (tmp_path / "bin").mkdir()
    if lines is not None:
        (tmp_path / "pyvenv.cfg").write_text("")
    if lines:
        (tmp_path / "bin" / "python").write_text("\n".join(["#!/bin/sh", *lines]))
        (tmp_path / "bin" / "python").chmod(0o755)
    with pytest.raises(ToolError) as refusal:
        packing.inspect(tmp_path)
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("packages", "changes", "says"),
    [
        ({}, {"python": "3.8"}, f"has Python 3.8, and the server's stub runs Python {PYTHON}"),
        ({"numpy": None}, {}, "has numpy not; each instance of a model imports numpy: "),
        ({"torch": "2.5.1+cu124"}, {}, "has torch 2.5.1+cu124; each"),
        ({"numpy": "2.1.0"}, {}, "garbles tensors of numpy 2"),
        ({}, {"outside": ["/elsewhere"]}, "imports from outside itself: /elsewhere"),
    ],
)
def test_refused(
    packages: dict[str, str | None], changes: dict[str, Any], says: str, sound: Path
) -> None:
    """An environment in which no model would load is refused before it is packed."""
    with pytest.raises(ToolError) as refusal:
        packing.check(_changed(sound, packages, **changes), PYTHON, numpy_1=True)
    assert f"{sound} " in str(refusal.value)
    assert says in str(refusal.value)


def test_accepted(sound: Path) -> None:
    """Torch from 2.6 on is accepted, and numpy 2 unless the stub garbles it."""
    for torch in ("2.6.0", "3.0", "2.10.0a0+git1234"):
        packing.check(_changed(sound, {"torch": torch, "numpy": "2.1.0"}), PYTHON, numpy_1=False)


def _changed(folder: Path, packages: dict[str, str | None], **changes: Any) -> Environment:
    environment = packing.inspect(folder)
    merged = {**environment.packages, **packages}
    installed = {name: version for name, version in merged.items() if version is not None}
    return dataclasses.replace(environment, packages=installed, **changes)


def test_needed_are_the_packages_own() -> None:
    """The required packages are this package's own dependencies."""
    written = _PYPROJECT.read_text(encoding="utf-8").partition("\ndependencies = [")[2]
    named = re.findall(r'^    "(\w+)(?:>=([\d.]+))?"', written.partition("\n]")[0], re.MULTILINE)
    for name, least in packing.NEEDED.items():
        assert (name, least) in named


# --- packed ----------------------------------------------------------------------------------

_REPORT = """
import ctypes, extra, json, math, sys
with open("/proc/self/maps") as maps:
    libraries = {line.split()[-1] for line in maps if "libpython" in line}
print(json.dumps([sys.prefix, sys.base_prefix, sys.executable, *sys.path, *libraries]))
"""


def test_archives_are_self_contained(unpacked: Path) -> None:
    """The interpreter, its library, its modules and the packages are those of the archive."""
    done = packed.activated(unpacked, "python3", "-I", "-c", _REPORT)
    assert done.returncode == 0, done.stderr
    paths = json.loads(done.stdout)
    assert {path for path in paths if not path.startswith(f"{unpacked}")} == set()
    assert done.stderr == ""


def test_commands_run_with_the_python_beside_them(unpacked: Path) -> None:
    """A command of the environment starts the environment's Python, wherever it was unpacked."""
    assert packed.activated(unpacked, "extra").stdout == "7\n"


def test_contents(archive: Path) -> None:
    """An archive has no owners, no unneeded files and no links out of it; all can read it."""
    assert archive.stat().st_mode & 0o444 == 0o444
    with tarfile.open(archive) as opened:
        members = opened.getmembers()
        linked = opened.extractfile(f"{SITE}/cached.py")
        assert linked is not None
        assert linked.read() == b"CACHED = 1\n"  # a link out of the environment
    assert {(entry.uid, entry.gid, entry.uname, entry.gname) for entry in members} == {
        (0, 0, "", "")
    }
    names = [member.name for member in members]
    assert names[0] == "bin/activate"
    assert len(names) == len(set(names))
    assert {"bin/python3", f"{SITE}/extra.py", f"lib/python{PYTHON}/os.py"} <= set(names)
    assert not [name for name in names if re.search(r"/python[\d.]+/test/|libpython.*\.a$", name)]
    assert "pyvenv.cfg" not in names
    bytecode = "encodings/__pycache__/utf_8.cpython-311.pyc"
    assert packing._NEEDLESS.fullmatch(f"{bytecode}.140213")  # it is being written
    assert not packing._NEEDLESS.fullmatch(bytecode)


def test_a_layer_needs_the_same_python(tmp_path: Path) -> None:
    """A layer has its packages only."""
    folder = packed.make(tmp_path / "env", layer=True)
    (folder / SITE / "extra.py").write_text("")
    packing.write(packing.inspect(folder), tmp_path / "layer.tar.gz")
    assert (tmp_path / "layer.tar.gz").stat().st_size < 1 << 20
    unpacked = packed.unpack(tmp_path / "layer.tar.gz", tmp_path / "unpacked")
    shutil.rmtree(folder)
    done = packed.activated(unpacked, "python3", "-I", "-c", _REPORT)
    assert done.returncode == 0, done.stderr
    prefix, base, *_ = json.loads(done.stdout)
    assert (prefix, base) == (str(unpacked), sys.base_prefix)


# --- atomic writes ---------------------------------------------------------------------------


@pytest.mark.parametrize("problem", ["link", "library"])
def test_failure_leaves_the_old_archive(problem: str, tmp_path: Path) -> None:
    """A failure leaves an existing archive unchanged, and no other files."""
    folder = packed.make(tmp_path / "env", names={})
    output = tmp_path / "out" / "env.tar.gz"
    output.parent.mkdir()
    output.write_bytes(b"old")
    environment, says = packing.inspect(folder), "share is a link to a folder"
    if problem == "link":
        (folder / "share").symlink_to(folder.parent)
    else:
        environment = dataclasses.replace(environment, library=None)
        says = f"has no libpython{PYTHON}.so.1.0"
    with pytest.raises(ToolError, match=says):
        packing.write(environment, output)
    assert output.read_bytes() == b"old"
    assert list(output.parent.iterdir()) == [output]


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("env.zip", "is no .tar.gz file"),
        ("missing/env.tar.gz", "cannot write"),
        ("env/env.tar.gz", "lies in the environment"),
    ],
)
def test_invalid_outputs(output: str, says: str, sound: Path) -> None:
    """A wrong name, a missing folder and the environment itself are refused."""
    with pytest.raises(ToolError, match=says):
        packing.write(packing.inspect(sound), sound.parent / output)


# --- conda -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conda(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment as conda lays it out, with an interpreter of its own."""
    folder = packed.unpack(archive, tmp_path_factory.mktemp("conda") / "env")
    (folder / "bin" / "activate").unlink()
    meta = folder / "conda-meta"
    meta.mkdir()
    (meta / "history").write_text("")
    files = [str(path.relative_to(folder)) for path in folder.rglob("*.py")]
    record = {
        "name": "python",
        "version": f"{PYTHON}.0",
        "build": "0",
        "files": files,
        "paths_data": {"paths": [{"_path": file, "path_type": "hardlink"} for file in files]},
        "link": {"source": "/nowhere/pkgs/python", "type": 1},
        "url": "",
    }
    (meta / f"python-{PYTHON}.0-0.json").write_text(json.dumps(record))
    return folder


@pytest.mark.filterwarnings("ignore")  # of conda-pack's: there is no cache of conda's here
def test_conda(conda: Path, tmp_path: Path) -> None:
    """conda-pack packs environments of conda; they run as Triton starts them."""
    environment = packing.inspect(conda)
    assert environment.kind == "conda"
    packing.write(environment, tmp_path / "conda.tar.gz")
    unpacked = packed.unpack(tmp_path / "conda.tar.gz", tmp_path / "unpacked")
    done = packed.activated(unpacked, "python3", "-I", "-c", _REPORT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == str(unpacked)


@pytest.mark.filterwarnings("ignore")
def test_conda_pack_fails(conda: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Errors of conda-pack are one line, no file is left, and a missing one is named."""
    module = conda / f"lib/python{PYTHON}/this.py"
    content = module.read_bytes()
    module.unlink()
    with pytest.raises(ToolError, match=r"conda-pack: .*deleted") as refusal:
        packing.write(packing.inspect(conda), tmp_path / "env.tar.gz")
    assert "\n" not in str(refusal.value)
    module.write_bytes(content)
    monkeypatch.setitem(sys.modules, "conda_pack", None)
    with pytest.raises(ToolError, match=r"torch-py-backend\[pack\]"):
        packing.write(packing.inspect(conda), tmp_path / "env.tar.gz")
    assert list(tmp_path.iterdir()) == []
