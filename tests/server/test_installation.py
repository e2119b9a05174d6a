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
from torch_py_backend.errors import BackendError, InstallError
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
    """A backend folder holds the shim and the whole package, and nothing else that has a source."""
    target = installation.install(backends, NAME)

    written = files(target)
    assert target == backends / NAME
    assert written.pop("model.py") == installation.SHIM.encode()
    assert written == {f"torch_py_backend/{name}": data for name, data in files(PACKAGE).items()}
    assert names(target) == CONTENT


def test_nothing_is_left_to_compile(backends: Path) -> None:
    """Python takes each module as it was compiled: instances that may not write compile nothing."""
    target = installation.install(backends, NAME)

    for source in target.rglob("*.py"):
        compiled = Path(importlib.util.cache_from_source(str(source))).read_bytes()
        told = source.stat()
        assert compiled[:4] == importlib.util.MAGIC_NUMBER
        # Of PEP 552: no flags, then what the source must have for this to be of it.
        assert struct.unpack("<III", compiled[4:16]) == (0, int(told.st_mtime), told.st_size)


@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
def test_server_of_another_user_can_read_it(umask: int, backends: Path) -> None:
    """Every folder can be entered and every file be read by all, whoever installs it."""
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
    """The shim takes its own copy of the package, without torch, before one in site-packages."""
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


def test_installing_twice_is_installing_once(backends: Path) -> None:
    """A second installation leaves the same files, and no third folder beside them."""
    once = files(installation.install(backends, NAME))

    assert files(installation.install(backends, NAME)) == once
    assert names(backends) == [NAME]


def test_older_installation_is_replaced(backends: Path) -> None:
    """What an older version wrote is gone: changed files are renewed, stale ones vanish."""
    target = installation.install(backends, NAME)
    new = files(target)
    (target / "model.py").write_text("old", encoding="utf-8")
    (target / "torch_py_backend" / "stale.py").write_text("old", encoding="utf-8")
    (target / "torch_py_backend" / "errors.py").unlink()
    (target / "stale").mkdir()

    installation.install(backends, NAME)

    assert files(target) == new
    assert not (target / "stale").exists()


def test_empty_folder_is_filled(backends: Path) -> None:
    """An empty folder of that name belongs to nobody."""
    (backends / NAME).mkdir(parents=True)

    assert (installation.install(backends, NAME) / "model.py").is_file()


def test_folder_for_backends_is_made(tmp_path: Path) -> None:
    """The backends' folder need not be there, nor the one above it."""
    target = installation.install(tmp_path / "opt" / "triton" / "backends", NAME)

    assert names(target) == CONTENT


def test_several_names_stand_side_by_side(backends: Path) -> None:
    """The backend can be there under two names, for example as drop-in for LibTorch's."""
    first = installation.install(backends, NAME)
    second = installation.install(backends, "pytorch")

    assert files(first) == files(second)
    assert names(backends) == ["pytorch", NAME]


def test_link_to_an_installation_is_replaced_by_one(backends: Path, tmp_path: Path) -> None:
    """Where the folder is a link, the link gives way, and what it points to stays."""
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


@pytest.mark.parametrize("name", [NAME, "pytorch"])
@pytest.mark.parametrize("ours", [True, False], ids=["with our package", "alone"])
@pytest.mark.parametrize("command", COMMANDS)
def test_folder_of_a_library_is_refused(
    command: Command, ours: bool, name: str, backends: Path
) -> None:
    """A folder with a C++ backend is not touched: Triton would prefer the library anyway."""
    target = backends / name
    target.mkdir(parents=True)
    library = target / f"libtriton_{name}.so"
    library.write_bytes(b"\x7fELF")
    if ours:
        (target / "torch_py_backend").mkdir()

    with pytest.raises(InstallError) as raised:
        command(backends, name)

    assert isinstance(raised.value, BackendError)
    assert f"{target} holds libtriton_{name}.so" in str(raised.value)
    assert "--backend-dir" in str(raised.value)
    assert library.read_bytes() == b"\x7fELF"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "content", ["model.py", "libtriton_other.so", "triton_python_backend_stub"]
)
def test_folder_of_another_backend_is_refused(
    content: str, command: Command, backends: Path
) -> None:
    """What we did not write is neither replaced nor removed."""
    target = backends / NAME
    target.mkdir(parents=True)
    (target / content).write_text("theirs", encoding="utf-8")

    with pytest.raises(InstallError) as raised:
        command(backends, NAME)

    assert str(target) in str(raised.value)
    assert "--name" in str(raised.value)
    assert files(target) == {content: b"theirs"}
    assert names(backends) == [NAME]


@pytest.mark.parametrize("command", COMMANDS)
def test_file_of_that_name_is_refused(command: Command, backends: Path) -> None:
    """A file where the folder should be is told, not overwritten."""
    backends.mkdir()
    (backends / NAME).write_text("theirs", encoding="utf-8")

    with pytest.raises(InstallError, match=f"{NAME} "):
        command(backends, NAME)

    assert files(backends) == {NAME: b"theirs"}


@pytest.mark.parametrize("name", ["", ".", "..", "../evil", "a/b", "/tmp/evil", "a b", "a\n"])
def test_name_that_is_a_path_is_refused(name: str, backends: Path) -> None:
    """A backend's name is one word: nothing is written outside the backends' folder."""
    for command in COMMANDS:
        with pytest.raises(InstallError, match="expected letters, digits"):
            command(backends, name)

    assert not backends.exists()


def test_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """Where the backends' folder cannot be made, the reason and the path are told."""
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")

    with pytest.raises(InstallError) as raised:
        installation.install(blocked / "backends", NAME)

    assert f"cannot install into {blocked / 'backends'}" in str(raised.value)
    assert "Not a directory" in str(raised.value)


def test_copy_that_fails_is_told_and_leaves_the_old_one(
    backends: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation that fails half-way says why, and the one before it still stands."""
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


def test_uninstall_removes_the_folder_alone(backends: Path) -> None:
    """Only the backend's own folder goes; its neighbours stay."""
    installation.install(backends, NAME)
    installation.install(backends, "other")

    assert installation.uninstall(backends, NAME) is True
    assert names(backends) == ["other"]


@pytest.mark.parametrize("made", [True, False], ids=["backends there", "no backends"])
def test_uninstall_of_nothing_is_told(made: bool, backends: Path) -> None:
    """Without an installation nothing is removed, and the caller can say so."""
    if made:
        backends.mkdir()

    assert installation.uninstall(backends, NAME) is False


def test_uninstall_twice(backends: Path) -> None:
    """The second time there is nothing to remove."""
    installation.install(backends, NAME)

    assert [installation.uninstall(backends, NAME) for _ in range(2)] == [True, False]


def test_uninstall_takes_a_link_and_leaves_what_it_points_to(
    backends: Path, tmp_path: Path
) -> None:
    """Where the folder is a link to an installation, the link is removed."""
    elsewhere = installation.install(tmp_path / "elsewhere", NAME)
    backends.mkdir()
    (backends / NAME).symlink_to(elsewhere)

    assert installation.uninstall(backends, NAME) is True
    assert names(backends) == []
    assert (elsewhere / "model.py").is_file()
