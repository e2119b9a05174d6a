"""Installing the backend: what is written, replaced, refused and removed."""

import errno
import importlib.util
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import torch_py_backend
from torch_py_backend.errors import InstallError
from torch_py_backend.server import installation

NAME = "pytorch_py"
CONTENT = ["__pycache__", "model.py", "torch_py_backend"]
REPOSITORY = Path(__file__).parents[2]
PACKAGE = Path(torch_py_backend.__file__).parent
Command = Callable[[Path, str], object]
COMMANDS: list[Command] = [installation.install, installation.uninstall]


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content, less what Python compiled."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    return tmp_path / "backends"


# --- what is written -------------------------------------------------------------------------


def test_shim_is_the_repositorys() -> None:
    """The shim that install writes is the file in the repository, byte for byte."""
    shim = REPOSITORY / "backends" / NAME / "model.py"

    assert installation.SHIM.encode() == shim.read_bytes()


def test_backend_is_the_shim_and_the_package(backends: Path) -> None:
    """A backend folder holds the shim and the whole package, and no other file."""
    target = installation.install(backends, NAME)

    written = files(target)
    assert target == backends / NAME
    assert written.pop("model.py") == installation.SHIM.encode()
    assert written == {f"torch_py_backend/{name}": data for name, data in files(PACKAGE).items()}
    assert names(target) == CONTENT


def test_modules_are_compiled(backends: Path) -> None:
    """Each module has its bytecode: instances may not be able to write it."""
    target = installation.install(backends, NAME)

    for source in target.rglob("*.py"):
        compiled = Path(importlib.util.cache_from_source(str(source))).read_bytes()
        status = source.stat()
        assert compiled[:4] == importlib.util.MAGIC_NUMBER
        # PEP 552: no flags, then time and size of the source.
        assert struct.unpack("<III", compiled[4:16]) == (0, int(status.st_mtime), status.st_size)


@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
def test_server_of_another_user_can_read_it(umask: int, backends: Path) -> None:
    """All users can enter every folder and read every file, with any umask."""
    backends.mkdir()
    before = os.umask(umask)
    try:
        target = installation.install(backends, NAME)
    finally:
        os.umask(before)

    closed = [
        path
        for path in (target, *target.rglob("*"))
        if path.stat().st_mode & 0o444 != 0o444
        or (path.is_dir() and path.stat().st_mode & 0o111 != 0o111)
    ]
    assert closed == []


def test_installed_shim_imports_the_package_beside_it(backends: Path, tmp_path: Path) -> None:
    """It prefers the package beside it to one in site-packages, and does not import torch."""
    target = installation.install(backends, NAME)
    (tmp_path / "triton_python_backend_utils.py").write_text("", encoding="utf-8")
    program = f"""
import sys
sys.path += [{str(tmp_path)!r}, {str(target)!r}]
import model, torch_py_backend
print(torch_py_backend.__file__)
print(model.TritonPythonModel.__module__)
print("torch" in sys.modules)
"""

    done = subprocess.run(
        [sys.executable, "-B", "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )

    assert done.stdout.split() == [
        str(target / "torch_py_backend" / "__init__.py"),
        "torch_py_backend.adapter",
        "False",
    ]


# --- again -----------------------------------------------------------------------------------


def test_older_installation_is_replaced(backends: Path) -> None:
    """Changed files are renewed, stale ones are removed, and no other folder is left."""
    target = installation.install(backends, NAME)
    new = files(target)
    (target / "model.py").write_text("old", encoding="utf-8")
    (target / "torch_py_backend" / "stale.py").write_text("old", encoding="utf-8")
    (target / "torch_py_backend" / "errors.py").unlink()
    (target / "stale").mkdir()

    installation.install(backends, NAME)

    assert files(target) == new
    assert not (target / "stale").exists()
    assert names(backends) == [NAME]


def test_folders_that_are_missing_or_empty_are_filled(tmp_path: Path) -> None:
    """The backend directory and its parents are created; several names stand side by side."""
    backends = tmp_path / "opt" / "backends"
    first = installation.install(backends, NAME)
    (backends / "pytorch").mkdir()
    assert files(first) == files(installation.install(backends, "pytorch"))
    assert names(backends) == ["pytorch", NAME]


def test_link_to_an_installation_is_replaced_by_one(backends: Path, tmp_path: Path) -> None:
    """The link is replaced, and its target stays."""
    elsewhere = installation.install(tmp_path / "elsewhere", NAME)
    (elsewhere / "model.py").write_text("old", encoding="utf-8")
    backends.mkdir()
    (backends / NAME).symlink_to(elsewhere)

    target = installation.install(backends, NAME)

    assert not target.is_symlink()
    assert (target / "model.py").read_text(encoding="utf-8") == installation.SHIM
    assert (elsewhere / "model.py").read_text(encoding="utf-8") == "old"


def test_folder_of_an_image_layer_is_replaced(
    backends: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where overlayfs will not move the old folder (EXDEV), it is removed instead."""
    target = installation.install(backends, NAME)
    (target / "stale").write_text("", encoding="utf-8")
    rename = Path.rename

    def rename_in_an_upper_layer(self: Path, other: Path) -> Path:
        if self == target:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(self))
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", rename_in_an_upper_layer)

    installation.install(backends, NAME)

    assert names(target) == CONTENT
    assert names(backends) == [NAME]


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (f"libtriton_{NAME}.so", f"holds libtriton_{NAME}.so"),
        ("model.py", "--name"),
        ("libtriton_other.so", "--name"),
    ],
)
def test_folder_of_another_backend_is_refused(
    content: str, text: str, command: Command, backends: Path
) -> None:
    """Files of other backends are kept; Triton prefers a library to any model.py."""
    target = backends / NAME
    target.mkdir(parents=True)
    (target / content).write_text("theirs", encoding="utf-8")

    with pytest.raises(InstallError, match=text) as raised:
        command(backends, NAME)

    assert str(target) in str(raised.value)
    assert files(target) == {content: b"theirs"}
    assert names(backends) == [NAME]


def test_library_beside_our_package_is_refused(backends: Path) -> None:
    """A library that was added to our folder is not removed with it."""
    target = installation.install(backends, NAME)
    (target / f"libtriton_{NAME}.so").write_bytes(b"")

    for command in COMMANDS:
        with pytest.raises(InstallError, match="--backend-dir"):
            command(backends, NAME)


@pytest.mark.parametrize("command", COMMANDS)
def test_file_of_that_name_is_refused(command: Command, backends: Path) -> None:
    """A file where the folder should be is not overwritten."""
    backends.mkdir()
    (backends / NAME).write_text("theirs", encoding="utf-8")

    with pytest.raises(InstallError, match=f"{NAME} "):
        command(backends, NAME)

    assert files(backends) == {NAME: b"theirs"}


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp/evil", "a\n"])
def test_name_that_is_a_path_is_refused(name: str, backends: Path) -> None:
    """Nothing is written outside the backend directory."""
    for command in COMMANDS:
        with pytest.raises(InstallError, match="expected letters, digits"):
            command(backends, name)

    assert not backends.exists()


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The error has the reason and the path."""
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")

    with pytest.raises(InstallError) as raised:
        installation.install(blocked / "backends", NAME)

    assert f"cannot install into {blocked / 'backends'}" in str(raised.value)
    assert "Not a directory" in str(raised.value)


def test_copy_that_fails_keeps_the_old_installation(
    backends: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the reason, and no part of the new installation is left."""
    target = installation.install(backends, NAME)
    before = files(target)
    broken = tmp_path / "torch_py_backend"
    broken.mkdir()
    (broken / "lost.py").symlink_to("nowhere")
    monkeypatch.setattr(installation, "PACKAGE", broken)

    with pytest.raises(InstallError) as raised:
        installation.install(backends, NAME)

    assert "No such file or directory" in str(raised.value)
    assert "lost.py" in str(raised.value)
    assert files(target) == before
    assert names(backends) == [NAME]


def test_move_that_fails_puts_the_old_one_back(
    backends: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the new folder cannot be moved into place, the old one returns to it."""
    target = installation.install(backends, NAME)
    (target / "model.py").write_text("old", encoding="utf-8")
    rename = Path.rename

    def rename_but_the_new(self: Path, other: Path) -> Path:
        if self.name == NAME and self != target:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(other))
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", rename_but_the_new)

    with pytest.raises(InstallError, match="No space left on device"):
        installation.install(backends, NAME)

    assert (target / "model.py").read_text(encoding="utf-8") == "old"
    assert names(backends) == [NAME]


# --- uninstall -------------------------------------------------------------------------------


def test_uninstall_removes_only_the_folder(backends: Path) -> None:
    """It returns whether there was an installation; other folders stay."""
    assert installation.uninstall(backends, NAME) is False
    installation.install(backends, NAME)
    installation.install(backends, "other")

    assert [installation.uninstall(backends, NAME) for _ in range(2)] == [True, False]
    assert names(backends) == ["other"]


def test_uninstall_takes_a_link_and_leaves_what_it_points_to(
    backends: Path, tmp_path: Path
) -> None:
    """The link is removed, and its target stays."""
    elsewhere = installation.install(tmp_path / "elsewhere", NAME)
    backends.mkdir()
    (backends / NAME).symlink_to(elsewhere)

    assert installation.uninstall(backends, NAME) is True
    assert names(backends) == []
    assert (elsewhere / "model.py").is_file()
