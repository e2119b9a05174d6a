import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.artifacts import discovery
from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.errors import ArtifactError, ConfigError

SOURCE = "class Net: ...\n"


class Doubled(nn.Module):
    """A module with a weight, as user code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def script(path: Path) -> None:
    torch.jit.save(torch.jit.script(Doubled()), path)


def archive(**members: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            for name, content in members.items():
                file.writestr(f"model/{name}", content)

    return write


def raw(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def test_source_is_not_run(tmp_path: Path) -> None:
    """find() does not import model.py."""
    build.write(tmp_path, "model.py", "raise SystemExit('run')\n")

    assert discovery.find(build.config(tmp_path)).kind is ArtifactType.MODULE


# --- which file ------------------------------------------------------------------------------


def weights(path: Path) -> None:
    torch.save(Doubled().state_dict(), path)


exported = archive(**{"models/model.json": b"{}"})
aoti = archive(**{"data/aotinductor/model/wrapper.cpp": b""})


def source(path: Path) -> None:
    path.write_text(SOURCE, encoding="utf-8")


def store(folder: Path, files: dict[str, Callable[[Path], None]]) -> None:
    for name, write in files.items():
        write(build.write(folder, name, ""))


_PY = {"model.py": source}


@pytest.mark.parametrize(
    ("files", "name", "kind", "model", "beside"),
    [
        (_PY, None, ArtifactType.MODULE, "model.py", None),
        ({"model.pt": script}, None, ArtifactType.TORCHSCRIPT, "model.pt", None),
        ({"model.pt2": exported}, None, ArtifactType.EXPORTED, "model.pt2", None),
        ({"model.pt2": aoti}, None, ArtifactType.AOTI, "model.pt2", None),
        ({"model.mar/handler.py": source}, None, ArtifactType.TORCHSERVE, "model.mar", None),
        # The type follows from the bytes, not from the name.
        ({"model.pt": exported}, None, ArtifactType.EXPORTED, "model.pt", None),
        # Weights beside the source.
        (_PY | {"model.pt": weights}, None, ArtifactType.MODULE, "model.py", "model.pt"),
        (_PY | {"model.pth": weights}, None, ArtifactType.MODULE, "model.py", "model.pth"),
        (
            _PY | {"model.safetensors.index.json": raw(b"{}")},
            None,
            ArtifactType.MODULE,
            "model.py",
            "model.safetensors.index.json",
        ),
        (_PY | {"other.pt": weights}, None, ArtifactType.MODULE, "model.py", None),
        # The order of default names.
        ({"model.pt2": aoti, "model.pt": script}, None, ArtifactType.TORCHSCRIPT, "model.pt", None),
        (_PY | {"model.pt2": aoti}, None, ArtifactType.MODULE, "model.py", None),
        # default_model_filename.
        (_PY | {"model.pt2": aoti}, "model.pt2", ArtifactType.AOTI, "model.pt2", None),
        (_PY | {"net.pt": script}, "net.pt", ArtifactType.TORCHSCRIPT, "net.pt", None),
        (
            {"net.py": source, "net.pt": weights, "model.pt": script},
            "net.py",
            ArtifactType.MODULE,
            "net.py",
            "net.pt",
        ),
        (
            {"sub/net.py": source, "sub/net.pth": weights},
            "sub/net.pth",
            ArtifactType.MODULE,
            "sub/net.py",
            "sub/net.pth",
        ),
        # What Triton sets for `platform: "pytorch_libtorch"`.
        ({"model.pt2": exported}, "model.pt", ArtifactType.EXPORTED, "model.pt2", None),
        (_PY | {"model.pt": weights}, "model.pt", ArtifactType.MODULE, "model.py", "model.pt"),
        (_PY | {"model.pt": script}, "model.pt", ArtifactType.TORCHSCRIPT, "model.pt", None),
    ],
)
def test_model_file_is_found(
    files: dict[str, Callable[[Path], None]],
    name: str | None,
    kind: ArtifactType,
    model: str,
    beside: str | None,
    tmp_path: Path,
) -> None:
    """The model is the named file of its version, else model.py, model.pt or model.pt2."""
    store(tmp_path, files)
    version = (tmp_path / "1").rename(tmp_path / "12")

    artifact = discovery.find(build.config(tmp_path, version="12", default_model_filename=name))

    assert artifact == Artifact(kind, version / model, version / beside if beside else None)


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ([], None, "holds no files; expected model.py or model.pt or model.pt2 or model.mar."),
        (["b.txt", "a.pt"], None, "holds a.pt, b.txt, model.pth (a broken link); expected model."),
        (["net.py"], "model.pt", "expected model.pt or model.py"),
        (["model.py/x"], None, "expected model.py or model.pt"),
    ],
)
def test_missing_model_file(
    files: list[str], name: str | None, message: str, tmp_path: Path
) -> None:
    """The error lists the existing files and the expected names."""
    for file in files:
        build.write(tmp_path, file, "")
    if "broken" in message:
        (tmp_path / "1" / "model.pth").symlink_to("gone.pt")

    with pytest.raises(ArtifactError) as raised:
        discovery.find(build.config(tmp_path, default_model_filename=name))

    assert str(raised.value).startswith("model 'digits': version 1 holds ")
    assert message in str(raised.value)


def test_missing_version_folder(tmp_path: Path) -> None:
    """A missing version folder is the same error as an empty one."""
    with pytest.raises(ArtifactError, match="version 3 holds no files"):
        discovery.find(build.config(tmp_path, version="3"))


# --- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "path", "kind"),
    [
        ({"weights": "none"}, "1/model.py", ArtifactType.MODULE),
        ({"weights": "None", "model_factory": "package:Net"}, "1", ArtifactType.FACTORY),
    ],
)
def test_weights_none(
    options: dict[str, Any], path: str, kind: ArtifactType, tmp_path: Path
) -> None:
    """With WEIGHTS none, weights files in the version folder are ignored."""
    store(tmp_path, {"model.py": source, "model.pt": weights, "model.pth": weights})

    artifact = discovery.find(build.config(tmp_path, **options))

    assert artifact == Artifact(kind, tmp_path / path, weightless=True)


@pytest.mark.parametrize("name", ["best.pt", "../best.safetensors", "../2/best.pt"])
def test_weights_in_the_model_folder(name: str, tmp_path: Path) -> None:
    """The named file may be in a folder that all versions share."""
    store(tmp_path, {"model.py": source, "model.pt": weights, name: weights})

    artifact = discovery.find(build.config(tmp_path, weights=name))

    assert artifact.weights is not None
    assert artifact.weights.samefile(tmp_path / "1" / name)


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    """A link to a file of the model, and a model folder that is a link, are accepted."""
    store(tmp_path / "store", {"model.py": source, "epoch7.pt": weights})
    (tmp_path / "store" / "1" / "best.pt").symlink_to("epoch7.pt")
    (tmp_path / "digits").symlink_to(tmp_path / "store")

    artifact = discovery.find(build.config(tmp_path / "digits", weights="best.pt"))

    assert artifact.weights == tmp_path / "digits" / "1" / "best.pt"


@pytest.mark.parametrize("name", ["best.pt", "folder", "broken.pt"])
def test_missing_weights(name: str, tmp_path: Path) -> None:
    """A name without a file is rejected; the error says what to do."""
    store(tmp_path, {"model.py": source, "model.pt": weights})
    (tmp_path / "1" / "folder").mkdir()
    (tmp_path / "1" / "broken.pt").symlink_to("nothing")

    with pytest.raises(ArtifactError) as raised:
        discovery.find(build.config(tmp_path, weights=name))

    assert f"'digits': WEIGHTS is '{name}', and version 1 has no such file" in str(raised.value)
    assert "Correct the name in config.pbtxt" in str(raised.value)


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors", "model.safetensors.index.json"),
        ("model.safetensors", "model.pt", "model.pth"),
    ],
    ids=" ".join,
)
def test_several_weights_need_a_name(names: tuple[str, ...], tmp_path: Path) -> None:
    """Two candidates for the weights are an error; the parameter WEIGHTS decides."""
    store(tmp_path, {"model.py": source, **dict.fromkeys(names, weights)})

    with pytest.raises(ArtifactError) as raised:
        discovery.find(build.config(tmp_path))
    named = discovery.find(build.config(tmp_path, weights=names[1]))

    assert f"version 1 holds {' and '.join(names)}; expected one file" in str(raised.value)
    assert "WEIGHTS" in str(raised.value)
    assert named.weights == tmp_path / "1" / names[1]


# --- a factory of a package ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "options", "beside"),
    [
        ({"model.pt2": script}, {}, None),
        ({"model.pt": weights}, {}, "model.pt"),
        ({"b.pth": weights}, {"weights": "b.pth"}, "b.pth"),
    ],
)
def test_factory_of_a_package_needs_no_file(
    files: dict[str, Callable[[Path], None]],
    options: dict[str, Any],
    beside: str | None,
    tmp_path: Path,
) -> None:
    """A factory with a colon belongs to a package; the version folder may hold its weights."""
    store(tmp_path, files)
    version = tmp_path / "1"

    artifact = discovery.find(build.config(tmp_path, model_factory="package:Net", **options))

    weights_file = version / beside if beside else None
    assert artifact == Artifact(ArtifactType.FACTORY, version, weights_file)


def test_factory_of_the_source(tmp_path: Path) -> None:
    """A factory without a colon is a function of model.py."""
    store(tmp_path, {"model.py": source})

    artifact = discovery.find(build.config(tmp_path, model_factory="make"))

    assert artifact == Artifact(ArtifactType.MODULE, tmp_path / "1" / "model.py")


# --- FALLBACK --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "files", "kind", "beside"),
    [
        ("../slow.pt2", {"../slow.pt2": exported}, ArtifactType.EXPORTED, None),
        ("net.pt", {"net.pt": script}, ArtifactType.TORCHSCRIPT, None),
        ("net.py", {"net.py": source, "net.pth": weights}, ArtifactType.MODULE, "net.pth"),
    ],
)
def test_fallback_of_a_package(
    name: str,
    files: dict[str, Callable[[Path], None]],
    kind: ArtifactType,
    beside: str | None,
    tmp_path: Path,
) -> None:
    """An AOTInductor package may have a fallback, which has its own weights."""
    store(tmp_path, {"model.pt2": aoti, **files})
    version = tmp_path / "1"

    artifact = discovery.find(build.config(tmp_path, fallback=name))

    fallback = Artifact(kind, version / name, version / beside if beside else None)
    assert artifact == Artifact(ArtifactType.AOTI, version / "model.pt2", fallback=fallback)


@pytest.mark.parametrize(
    ("files", "options", "error", "message"),
    [
        (
            {"model.pt2": exported},
            {},
            ConfigError,
            "FALLBACK is set, and the model is a torch.export program; expected an AOTInductor",
        ),
        (
            {},
            {"model_factory": "package:Net"},
            ConfigError,
            "FALLBACK is set, and the model is a factory of an installed package",
        ),
        ({"model.pt2": aoti}, {}, ArtifactError, "FALLBACK is 'net.pt', and version 1 has no such"),
        ({"model.pt2": aoti, "net.pt": weights}, {}, ArtifactError, "net.pt is a state_dict"),
    ],
)
def test_invalid_fallback(
    files: dict[str, Callable[[Path], None]],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    """An invalid fallback fails the load on every machine, not only where it is used."""
    store(tmp_path, files)

    with pytest.raises(error, match=f"model 'digits': {message}"):
        discovery.find(build.config(tmp_path, fallback="net.pt", **options))


@pytest.mark.parametrize(
    ("artifact", "expected"),
    [
        (Artifact(ArtifactType.MODULE, Path("model.py")), ["model.py"]),
        (
            Artifact(ArtifactType.MODULE, Path("model.py"), Path("model.pt")),
            ["model.py", "model.pt"],
        ),
        (
            Artifact(ArtifactType.MODULE, Path("model.py"), Path("model.safetensors.index.json")),
            ["model.py", "model.safetensors.index.json", "a", "b"],
        ),
        (
            Artifact(ArtifactType.MODULE, Path("model.py"), Path("broken.json")),
            ["model.py", "broken.json"],
        ),
        (Artifact(ArtifactType.FACTORY, Path()), ["a", "b", "broken.json", "model.pt", "model.py"]),
        (Artifact(ArtifactType.FACTORY, Path(), Path("model.pt")), ["model.pt"]),
        (
            Artifact(
                ArtifactType.AOTI, Path("a"), fallback=Artifact(ArtifactType.TORCHSCRIPT, Path("b"))
            ),
            ["a", "b"],
        ),
    ],
)
def test_files_of_an_artifact(
    artifact: Artifact, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """files() returns the model, its weights with existing shards, and its fallback."""
    for name in ("model.py", "model.pt", "broken.json", "a", "b"):
        (tmp_path / name).write_text("x")
    index = tmp_path / "model.safetensors.index.json"
    if artifact.kind is not ArtifactType.FACTORY:
        index.write_text('{"weight_map": {"x": "a", "y": "b", "z": "missing"}}')
    monkeypatch.chdir(tmp_path)
    assert [path.name for path in artifact.files()] == expected
