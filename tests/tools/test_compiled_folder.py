"""Folders of compiled files: written with a SHA-256 of each file; anything else is refused."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_py_backend.errors import ArchiveError, InstallError
from torch_py_backend.tools import compiled_folder

_FILES = {
    "net/1/model.pt2": b"abc" * 1000,
    "net/compile_cache/net-0.bundle": b"",
    "net/tuned.json": b"{}",
}


def _write(folder: Path) -> Path:
    with compiled_folder.created(folder) as export:
        for name, data in _FILES.items():
            (export / name).parent.mkdir(parents=True, exist_ok=True)
            (export / name).write_bytes(data)
        compiled_folder.write_manifest(export, {"net": {"model.py": "0"}})
    return folder


def test_round_trip(tmp_path: Path) -> None:
    """The manifest has the SHA-256 of each file, also beside a package; the same is the same."""
    folder = _write(tmp_path / "export")
    (model,) = json.loads((folder / "manifest.json").read_bytes())["models"].values()
    assert model["beside"] == {"model.py": "0"}
    assert model["files"] == {
        name.removeprefix("net/"): hashlib.sha256(data).hexdigest() for name, data in _FILES.items()
    }
    again = _write(tmp_path / "again")
    assert (again / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "export"]
    assert compiled_folder.read(folder) == {"net": {"model.py": "0"}}


def test_existing_folder(tmp_path: Path) -> None:
    """A folder that exists is not replaced."""
    with pytest.raises(InstallError, match="exists already"):
        _write(tmp_path)


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be completed is removed."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(InstallError, match="No space left on device"):
        _write(tmp_path / "export")
    assert not list(tmp_path.iterdir())


def _manifest(content: str | bytes) -> Callable[[Path], object]:
    """Replace the manifest."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / "manifest.json").write_bytes(data)


def _model(**changes: Any) -> Callable[[Path], object]:
    """Change what the manifest says of a model."""
    model: dict[str, Any] = {"beside": {}, "files": {}} | changes
    return _manifest(json.dumps({"models": {"net": model}}))


def _listed(name: str, digest: object = "0" * 64) -> Callable[[Path], object]:
    """Let the manifest list another file of the model."""

    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_bytes())
        manifest["models"]["net"]["files"][name] = digest
        path.write_text(json.dumps(manifest))

    return change


def _only(model: str) -> Callable[[Path], object]:
    """Let the manifest list one file of another model only."""
    models = {model: {"beside": {}, "files": {"tuned.json": "0" * 64}}}
    return _manifest(json.dumps({"models": models}))


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Replace a file of the model."""

    def change(folder: Path) -> None:
        path = folder / "net" / "1" / "model.pt2"
        path.unlink()
        make(path)

    return change


def _linked(folder: Path) -> None:
    """Replace the folder of a version by a link to it."""
    (folder / "net" / "1").rename(folder.parent / "elsewhere")
    (folder / "net" / "1").symlink_to(folder.parent / "elsewhere")


def _linked_manifest(folder: Path) -> None:
    (folder / "manifest.json").rename(folder.parent / "elsewhere")
    (folder / "manifest.json").symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(shutil.rmtree, "manifest.json: it cannot be read: File", id="no folder"),
        pytest.param(
            lambda at: (at / "manifest.json").unlink(), "it cannot be read: File", id="no manifest"
        ),
        pytest.param(_linked_manifest, "it is not a regular file", id="manifest is a link"),
        pytest.param(_manifest("{"), "manifest.json: it cannot be read: JSON", id="not JSON"),
        pytest.param(_manifest(b"\xff{"), "it cannot be read", id="not UTF-8"),
        pytest.param(_manifest("[" * 100_000), "it cannot be read", id="deep JSON"),
        pytest.param(_manifest("{}"), "it cannot be read: KeyError", id="no models"),
        pytest.param(_manifest('{"models": {"net": 1}}'), "it cannot be read", id="a number"),
        pytest.param(_model(beside=3), "it cannot be read", id="beside is a number"),
        pytest.param(_model(beside="value"), "it cannot be read", id="beside is text"),
        pytest.param(_model(), "manifest.json does not list it", id="no files"),
        pytest.param(_listed("1/model.pt2"), "its SHA-256 is not", id="another digest"),
        pytest.param(_listed("1/model.pt2", 7), "its SHA-256 is not", id="digest is a number"),
        pytest.param(_listed("/etc/passwd"), "it is not in the folder", id="absolute path"),
        pytest.param(_listed("../net/1/model.pt2"), "it is not in the", id="path leads out"),
        pytest.param(_listed("compile_cache/..\n"), "it is not in the folder", id="missing"),
        pytest.param(_only("../export/net"), "it is not in the folder", id="model leads out"),
        pytest.param(_linked, "net/1", id="link to a folder"),
        pytest.param(_replaced(lambda path: path.write_bytes(b"abd")), "SHA-256", id="other"),
        pytest.param(_replaced(lambda path: None), "it is not in the folder", id="removed"),
        pytest.param(
            _replaced(lambda path: path.symlink_to("/etc/passwd")), "not a regular", id="link"
        ),
        pytest.param(
            _replaced(lambda path: path.symlink_to("/dev/zero")), "not a regular", id="device"
        ),
        pytest.param(_replaced(os.mkfifo), "not a regular file", id="pipe"),
        pytest.param(_replaced(Path.mkdir), "it is not in the folder", id="folder"),
        pytest.param(
            lambda at: (at / "net" / "model\x1b.py").touch(),
            "net/model?.py: manifest.json does not list it",
            id="another file",
        ),
        pytest.param(
            lambda at: (at / "other").symlink_to("/etc"), "does not list it", id="another link"
        ),
    ],
)
def test_hostile_folder(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    """A folder that is damaged or malicious is refused with one sentence and a cure."""
    folder = _write(tmp_path / "export")
    damage(folder)
    with pytest.raises(ArchiveError, match=re.escape(message)) as refusal:
        compiled_folder.read(folder)
    assert str(refusal.value).isprintable()
    assert str(refusal.value).endswith("Export or copy it again.")
