"""OCI image layouts: written with the digests of their blobs; anything else is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_py_backend.errors import ArchiveError, InstallError
from torch_py_backend.tools import oci_layout
from torch_py_backend.tools.oci_layout import File, Layout

_CONFIG = "application/vnd.test+json"
_CONTENT = {"net/a.bin": b"abc" * 1000, "net/b.bin": b""}


def _write(folder: Path) -> Path:
    files = [File(title, "text/plain", io.BytesIO(data)) for title, data in _CONTENT.items()]
    oci_layout.write(folder, _CONFIG, {"key": "value"}, files)
    return folder


def _blob(layout: Path, descriptor: dict[str, Any]) -> Path:
    return layout / "blobs" / "sha256" / str(descriptor["digest"]).removeprefix("sha256:")


def _manifest(layout: Path) -> dict[str, Any]:
    index = json.loads((layout / "index.json").read_bytes())
    manifest: dict[str, Any] = json.loads(_blob(layout, index["manifests"][0]).read_bytes())
    return manifest


def _put_manifest(layout: Path, content: object) -> None:
    """Replace the manifest; its digest is right."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    digest = hashlib.sha256(data).hexdigest()
    (layout / "blobs" / "sha256" / digest).write_bytes(data)
    entry = {"mediaType": "any", "digest": f"sha256:{digest}", "size": len(data)}
    (layout / "index.json").write_text(json.dumps({"manifests": [entry]}))


def _extract(folder: Path, target: Path) -> None:
    layout = Layout(folder, _CONFIG)
    for layer in layout.layers:
        layout.extract(layer, target / layer.title.rpartition("/")[2])


def test_round_trip(tmp_path: Path) -> None:
    """Each blob has its SHA-256 as its name; the files come back; the same content is the same."""
    folder = _write(tmp_path / "layout")
    assert json.loads((folder / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads((folder / "index.json").read_bytes())["manifests"]
    manifest = _manifest(folder)
    named = [entry, manifest["config"], *manifest["layers"]]
    for descriptor in named:
        data = _blob(folder, descriptor).read_bytes()
        assert descriptor["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
        assert descriptor["size"] == len(data)
    assert {path.name for path in (folder / "blobs" / "sha256").iterdir()} == {
        descriptor["digest"].removeprefix("sha256:") for descriptor in named
    }
    layout = Layout(folder, _CONFIG)
    assert layout.config == {"key": "value"}
    for layer in layout.layers:
        layout.extract(layer, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == _CONTENT[layer.title]
        (tmp_path / "file").unlink()
    again = _write(tmp_path / "again")
    assert (again / "index.json").read_bytes() == (folder / "index.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "layout"]


def test_existing_folder(tmp_path: Path) -> None:
    """A folder that exists is not replaced."""
    with pytest.raises(InstallError, match="exists already"):
        _write(tmp_path)


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that cannot be completed is removed."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(InstallError, match="No space left on device"):
        _write(tmp_path / "layout")
    assert not list(tmp_path.iterdir())


def _index(content: str) -> Callable[[Path], object]:
    return lambda layout: (layout / "index.json").write_text(content)


def _descriptor(**changes: Any) -> Callable[[Path], object]:
    """Change the descriptor of the first layer."""

    def change(layout: Path) -> None:
        manifest = _manifest(layout)
        manifest["layers"][0] |= changes
        _put_manifest(layout, manifest)

    return change


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Replace the blob of the first layer."""

    def change(layout: Path) -> None:
        path = _blob(layout, _manifest(layout)["layers"][0])
        path.unlink()
        make(path)

    return change


def _other_config(layout: Path) -> None:
    manifest = _manifest(layout)
    manifest["config"]["mediaType"] = "application/vnd.oci.image.config.v1+json"
    _put_manifest(layout, manifest)


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda at: (at / "oci-layout").unlink(), "not an OCI", id="no layout"),
        pytest.param(lambda at: (at / "index.json").unlink(), "cannot be read", id="no index"),
        pytest.param(_index("{"), "index.json cannot be read: JSON", id="not JSON"),
        pytest.param(_index("[]"), "it is not an object", id="a list"),
        pytest.param(_index("[" * 100_000), "index.json cannot be read", id="deep JSON"),
        pytest.param(_index("{}"), "index.json cannot be read: KeyError", id="no manifests"),
        pytest.param(_index('{"manifests": []}'), "holds 0 manifests", id="no manifest"),
        pytest.param(_index('{"manifests": [1]}'), "index.json cannot be read", id="a number"),
        pytest.param(_index(" " * (5 << 20)), "has more than 4194304 bytes", id="large index"),
        pytest.param(
            lambda at: _put_manifest(at, b"\xff{"), "cannot be read", id="no manifest JSON"
        ),
        pytest.param(lambda at: _put_manifest(at, {"layers": 3}), "cannot be read", id="no config"),
        pytest.param(_other_config, "config is of the type", id="a container image"),
        pytest.param(_descriptor(digest="sha256:../../x"), "names a blob", id="digest leads out"),
        pytest.param(_descriptor(digest="sha512:" + "0" * 128), "names a blob", id="SHA-512"),
        pytest.param(_descriptor(digest=7), "cannot be read", id="digest is a number"),
        pytest.param(_descriptor(size=-1), "descriptor says -1", id="negative size"),
        pytest.param(_descriptor(size="9"), "names a blob", id="size is text"),
        pytest.param(_descriptor(size=1 << 50), "descriptor says 11258", id="size too large"),
        pytest.param(_replaced(_large), "has 1099511627776 bytes", id="huge blob"),
        pytest.param(_replaced(lambda path: path.write_bytes(b"abd" * 1000)), "digest", id="other"),
        pytest.param(_replaced(lambda path: None), "cannot be read: No such file", id="missing"),
        pytest.param(
            _replaced(lambda path: path.symlink_to("/etc/passwd")), "cannot be read", id="link"
        ),
        pytest.param(
            _replaced(lambda path: path.symlink_to("/dev/zero")), "cannot be", id="device"
        ),
        pytest.param(_replaced(os.mkfifo), "not a regular file", id="pipe"),
        pytest.param(_replaced(Path.mkdir), "Is a directory", id="folder"),
    ],
)
def test_hostile_layout(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    """A layout that is damaged or malicious is refused with one sentence and a cure."""
    folder = _write(tmp_path / "layout")
    damage(folder)
    with pytest.raises(ArchiveError, match=re.escape(message)) as refusal:
        _extract(folder, tmp_path)
    assert str(refusal.value).startswith("layout: ")
    assert str(refusal.value).endswith("Export or copy it again.")
