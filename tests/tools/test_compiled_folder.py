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
        compiled_folder.write_manifest(export, {"net": {"key": "value"}})
    return folder


def _copy(folder: Path, target: Path) -> None:
    compiled_folder.copy(compiled_folder.read(folder), target)


def test_round_trip(tmp_path: Path) -> None:
    """The manifest has the SHA-256 of each file; the files come back; the same is the same."""
    folder = _write(tmp_path / "export")
    (model,) = json.loads((folder / "manifest.json").read_bytes())["models"].values()
    assert model["facts"] == {"key": "value"}
    assert model["files"] == {
        name.removeprefix("net/"): hashlib.sha256(data).hexdigest() for name, data in _FILES.items()
    }
    again = _write(tmp_path / "again")
    assert (again / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "export"]
    (tmp_path / "copy").mkdir()
    _copy(folder, tmp_path / "copy")
    for kind, data in zip(("package", "bundle", "tuned.json"), _FILES.values(), strict=True):
        assert (tmp_path / "copy" / "net" / kind).read_bytes() == data


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
    model: dict[str, Any] = {"facts": {}, "files": {}} | changes
    return _manifest(json.dumps({"models": {"net": model}}))


def _listed(name: str, digest: object = "0" * 64) -> Callable[[Path], object]:
    """Let the manifest list another file of the model."""

    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_bytes())
        manifest["models"]["net"]["files"][name] = digest
        path.write_text(json.dumps(manifest))

    return change


def _only(name: str, model: str = "net") -> Callable[[Path], object]:
    """Let the manifest list one file only."""
    models = {model: {"facts": {}, "files": {name: "0" * 64}}}
    return _manifest(json.dumps({"models": models}))


def _replaced(
    make: Callable[[Path], object], name: str = "1/model.pt2"
) -> Callable[[Path], object]:
    """Replace a file of the model."""

    def change(folder: Path) -> None:
        path = folder / "net" / name
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


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(shutil.rmtree, "manifest.json: it cannot be read: No such", id="no folder"),
        pytest.param(
            lambda at: (at / "manifest.json").unlink(), "cannot be read: No such", id="no manifest"
        ),
        pytest.param(_linked_manifest, "it is not a regular file", id="manifest is a link"),
        pytest.param(_manifest("{"), "manifest.json: it cannot be read: JSON", id="not JSON"),
        pytest.param(_manifest(b"\xff{"), "it cannot be read", id="not UTF-8"),
        pytest.param(_manifest("[]"), "it cannot be read: TypeError", id="a list"),
        pytest.param(_manifest("[" * 100_000), "it cannot be read", id="deep JSON"),
        pytest.param(_manifest("{}"), "it cannot be read: KeyError", id="no models"),
        pytest.param(_manifest('{"models": [1]}'), "it cannot be read", id="models are a list"),
        pytest.param(_manifest('{"models": {"net": 1}}'), "it cannot be read", id="a number"),
        pytest.param(_manifest(" " * (5 << 20)), "it has 5242880 bytes", id="large manifest"),
        pytest.param(_model(files=3), "it cannot be read", id="files are a number"),
        pytest.param(_model(facts=3), "it cannot be read", id="facts are a number"),
        pytest.param(_model(facts="value"), "it cannot be read", id="facts are text"),
        pytest.param(_model(), "manifest.json does not list it", id="no files"),
        pytest.param(_listed("1/model.pt2"), "its SHA-256 is not", id="another digest"),
        pytest.param(_listed("1/model.pt2", 7), "its SHA-256 is not", id="digest is a number"),
        pytest.param(_listed("model.py"), "it lists 'net/model.py'", id="a source"),
        pytest.param(_listed("config.pbtxt"), "it lists 'net/config.pbtxt'", id="a config"),
        pytest.param(_listed("1/other.pt2"), "it lists 'net/1/other.pt2'", id="two packages"),
        pytest.param(_listed("/etc/passwd"), "it lists 'net//etc/passwd'", id="absolute path"),
        pytest.param(_listed("../net/1/model.pt2"), "it lists 'net/../net", id="path leads out"),
        pytest.param(_listed("1/../../x"), "it lists 'net/1/../../x'", id="path leads further out"),
        pytest.param(_only("compile_cache/..\n.bundle"), "No such file", id="missing"),
        pytest.param(_only("1/.."), "it is not a regular file", id="the model's folder"),
        pytest.param(_only("1/model.pt2", "../export/net"), "is not in the", id="model leads out"),
        pytest.param(_only("tuned.json", "/etc"), "cannot be read", id="model is a path"),
        pytest.param(_linked, "net/1", id="link to a folder"),
        pytest.param(_replaced(_large, "tuned.json"), "1099511627776 bytes", id="huge settings"),
        pytest.param(
            _replaced(_large, "compile_cache/net-0.bundle"), "1099511627776", id="huge bundle"
        ),
        pytest.param(_replaced(lambda path: path.write_bytes(b"abd")), "SHA-256", id="other"),
        pytest.param(_replaced(lambda path: None), "cannot be read: No such file", id="removed"),
        pytest.param(
            _replaced(lambda path: path.symlink_to("/etc/passwd")), "not a regular", id="link"
        ),
        pytest.param(
            _replaced(lambda path: path.symlink_to("/dev/zero")), "not a regular", id="device"
        ),
        pytest.param(_replaced(os.mkfifo), "not a regular file", id="pipe"),
        pytest.param(_replaced(Path.mkdir), "not a regular file", id="folder"),
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
    folder, target = _write(tmp_path / "export"), tmp_path / "target"
    target.mkdir()
    damage(folder)
    with pytest.raises(ArchiveError, match=re.escape(message)) as refusal:
        _copy(folder, target)
    assert str(refusal.value).isprintable()
    assert str(refusal.value).endswith("Export or copy it again.")


def test_huge_package(tmp_path: Path) -> None:
    """A package that does not fit on the disk is refused before it is copied."""
    folder, target = _write(tmp_path / "export"), tmp_path / "target"
    target.mkdir()
    with (folder / "net" / "1" / "model.pt2").open("wb") as file:
        file.truncate(shutil.disk_usage(target).free + (1 << 30))
    with pytest.raises(InstallError, match="bytes, and"):
        _copy(folder, target)
    assert not list(target.iterdir())
