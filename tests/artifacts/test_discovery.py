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


def save(thing: Any, **options: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(thing(), path, **options)


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


@pytest.mark.parametrize(
    ("files", "named", "kind", "model", "beside"),
    [
        pytest.param(
            {"model.py": source}, None, ArtifactType.MODULE, "model.py", None, id="source"
        ),
        pytest.param(
            {"model.pt": script}, None, ArtifactType.TORCHSCRIPT, "model.pt", None, id="jit"
        ),
        pytest.param(
            {"model.py": source, "model.pt": weights},
            None,
            ArtifactType.MODULE,
            "model.py",
            "model.pt",
            id="source and .pt",
        ),
        pytest.param(
            {"model.py": source, "model.pth": weights},
            None,
            ArtifactType.MODULE,
            "model.py",
            "model.pth",
            id="source and .pth",
        ),
        pytest.param(
            {"model.py": source, "model.safetensors": weights},
            None,
            ArtifactType.MODULE,
            "model.py",
            "model.safetensors",
            id="source and .safetensors",
        ),
        pytest.param(
            {"model.py": source, "other.pt": weights},
            None,
            ArtifactType.MODULE,
            "model.py",
            None,
            id="another file's weights",
        ),
        pytest.param(
            {"net.pt": script, "model.py": source},
            "net.pt",
            ArtifactType.TORCHSCRIPT,
            "net.pt",
            None,
            id="named jit",
        ),
        pytest.param(
            {"net.py": source, "net.pt": weights, "model.pt": script},
            "net.py",
            ArtifactType.MODULE,
            "net.py",
            "net.pt",
            id="named source",
        ),
        pytest.param(
            {"net.py": source, "net.pt": weights},
            "net.pt",
            ArtifactType.MODULE,
            "net.py",
            "net.pt",
            id="named weights with their source",
        ),
        pytest.param(
            {"model.py": source, "model.safetensors.index.json": raw(b"{}")},
            None,
            ArtifactType.MODULE,
            "model.py",
            "model.safetensors.index.json",
            id="source and sharded safetensors",
        ),
        pytest.param(
            {"model.pt2": exported}, None, ArtifactType.EXPORTED, "model.pt2", None, id="exported"
        ),
        pytest.param(
            {"model.pt2": aoti}, None, ArtifactType.AOTI, "model.pt2", None, id="AOTInductor"
        ),
        pytest.param(
            {"model.pt2": aoti, "model.pt": script},
            None,
            ArtifactType.TORCHSCRIPT,
            "model.pt",
            None,
            id="jit before a package",
        ),
        pytest.param(
            {"model.pt2": aoti, "model.py": source},
            None,
            ArtifactType.MODULE,
            "model.py",
            None,
            id="source before a package",
        ),
        pytest.param(
            {"model.pt2": aoti, "model.py": source},
            "model.pt2",
            ArtifactType.AOTI,
            "model.pt2",
            None,
            id="named package",
        ),
        pytest.param(
            {"model.pt": exported}, None, ArtifactType.EXPORTED, "model.pt", None, id="by bytes"
        ),
        pytest.param(
            {"sub/net.py": source, "sub/net.pth": weights},
            "sub/net.py",
            ArtifactType.MODULE,
            "sub/net.py",
            "sub/net.pth",
            id="in a folder",
        ),
        pytest.param(
            {"model.pt2": exported},
            "model.pt",
            ArtifactType.EXPORTED,
            "model.pt2",
            None,
            id="filled in, pt2",
        ),
        pytest.param(
            {"model.mar/handler.py": source, "model.mar/model.pt": weights},
            None,
            ArtifactType.TORCHSERVE,
            "model.mar",
            None,
            id="TorchServe archive",
        ),
        # What Triton fills in for `platform: "pytorch_libtorch"`:
        pytest.param(
            {"model.py": source},
            "model.pt",
            ArtifactType.MODULE,
            "model.py",
            None,
            id="filled in, source",
        ),
        pytest.param(
            {"model.py": source, "model.pt": weights},
            "model.pt",
            ArtifactType.MODULE,
            "model.py",
            "model.pt",
            id="filled in, source and weights",
        ),
        pytest.param(
            {"model.py": source, "model.pt": script},
            "model.pt",
            ArtifactType.TORCHSCRIPT,
            "model.pt",
            None,
            id="filled in, jit",
        ),
    ],
)
def test_model_file_is_found(
    files: dict[str, Callable[[Path], None]],
    named: str | None,
    kind: ArtifactType,
    model: str,
    beside: str | None,
    tmp_path: Path,
) -> None:
    """The model is the named file, else model.py, model.pt or model.pt2."""
    store(tmp_path, files)
    version = tmp_path / "1"

    found = discovery.find(build.config(tmp_path, default_model_filename=named))

    assert found == Artifact(kind, version / model, version / beside if beside else None)


def test_model_file_is_found_in_its_own_version(tmp_path: Path) -> None:
    """Each version uses its own folder."""
    build.write(tmp_path, "model.py", SOURCE)
    (tmp_path / "1").rename(tmp_path / "12")

    found = discovery.find(build.config(tmp_path, version="12"))

    assert found.path == tmp_path / "12" / "model.py"


@pytest.mark.parametrize(
    ("files", "named", "said"),
    [
        pytest.param(
            [], None, ["version 1 holds no files", "expected model.py or model.pt"], id="nothing"
        ),
        pytest.param(
            ["b.txt", "a.pt"],
            None,
            ["version 1 holds a.pt, b.txt", "default_model_filename"],
            id="other names",
        ),
        pytest.param(
            ["model.pt", "model.py"],
            "net.pt",
            ["version 1 holds model.pt, model.py", "expected net.pt."],
            id="the named one is missing",
        ),
        pytest.param(
            ["net.py"],
            "model.pt",
            ["holds net.py", "expected model.pt or model.py"],
            id="filled in",
        ),
        pytest.param(
            ["model.py/x"],
            None,
            ["expected model.py or model.pt or model.pt2 or model.mar."],
            id="a folder",
        ),
    ],
)
def test_missing_model_file(
    files: list[str], named: str | None, said: list[str], tmp_path: Path
) -> None:
    """The error lists the existing files and the expected names."""
    for name in files:
        build.write(tmp_path, name, "")

    with pytest.raises(ArtifactError) as raised:
        discovery.find(build.config(tmp_path, default_model_filename=named))

    assert str(raised.value).startswith("model 'digits': version 1 holds ")
    assert all(part in str(raised.value) for part in said)


def test_broken_link(tmp_path: Path) -> None:
    """A link to a missing file is listed as a broken link."""
    build.write(tmp_path, "notes.txt", "")
    (tmp_path / "1" / "model.pt").symlink_to("gone.pt")

    with pytest.raises(ArtifactError, match=r"holds model\.pt \(a broken link\), notes\.txt;"):
        discovery.find(build.config(tmp_path))


def test_missing_version_folder(tmp_path: Path) -> None:
    """A missing version folder is the same error as an empty one."""
    with pytest.raises(ArtifactError, match="version 3 holds no files"):
        discovery.find(build.config(tmp_path, version="3"))


@pytest.mark.parametrize(
    ("write", "said", "cure"),
    [
        pytest.param(
            weights, "is a state_dict: weights without code", "in net.py beside it", id="state_dict"
        ),
        pytest.param(
            save(Doubled), "is a pickle of a whole module", "net.py beside it", id="pickle"
        ),
        pytest.param(raw(b""), "is empty", "copy it again", id="empty"),
        pytest.param(
            raw(b"PK\x03\x04"), "is a truncated or damaged zip", "copy it again", id="truncated"
        ),
        pytest.param(raw(b"hello"), "is not a file that torch.save", "torch.jit.save", id="text"),
    ],
)
def test_unsupported_file(
    write: Callable[[Path], None], said: str, cure: str, tmp_path: Path
) -> None:
    """The error names the type of the file, and the advice fits its name."""
    store(tmp_path, {"net.pt": write, "model.py": source})

    with pytest.raises(ArtifactError) as raised:
        discovery.find(build.config(tmp_path, default_model_filename="net.pt"))

    assert f"'digits': net.pt {said}" in str(raised.value)
    assert "expected TorchScript, a torch.export program, an AOTInductor package, or a" in str(
        raised.value
    )
    assert cure in str(raised.value)


# --- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["none", "None", "NONE"])
def test_weights_none(word: str, tmp_path: Path) -> None:
    """With WEIGHTS none, weights files beside the source are ignored."""
    store(tmp_path, {"model.py": source, "model.pt": weights, "model.pth": weights})

    found = discovery.find(build.config(tmp_path, weights=word))

    assert found == Artifact(
        ArtifactType.MODULE, tmp_path / "1" / "model.py", None, weightless=True
    )


@pytest.mark.parametrize("name", ["best.pt", "sub/best.pth", "../best.safetensors", "../2/best.pt"])
def test_weights_in_the_model_folder(name: str, tmp_path: Path) -> None:
    """The named file may be in a folder that all versions share."""
    store(tmp_path, {"model.py": source, "model.pt": weights, name: weights})

    found = discovery.find(build.config(tmp_path, weights=name))

    assert found.weights is not None
    assert found.weights.samefile(tmp_path / "1" / name)


@pytest.mark.parametrize(
    "name", ["../../secret.pt", "{outside}/secret.pt", "../../digits2/w.pt", "/etc/passwd"]
)
@pytest.mark.parametrize("there", [True, False], ids=["there", "missing"])
def test_weights_outside_the_model_folder(name: str, there: bool, tmp_path: Path) -> None:
    """A name outside the model's folder is rejected, whether the file exists or not."""
    folder = tmp_path / "digits"
    store(folder, {"model.py": source})
    (tmp_path / "digits2").mkdir()
    name = name.format(outside=tmp_path)
    if there and not name.startswith("/etc"):
        weights(folder / "1" / name)

    with pytest.raises(ConfigError) as raised:
        discovery.find(build.config(folder, weights=name))

    assert f"'digits': WEIGHTS is '{name}'" in str(raised.value)
    assert "expected a file in the model's own folder" in str(raised.value)


def test_weights_behind_a_link_out_of_the_folder(tmp_path: Path) -> None:
    """WEIGHTS cannot leave the model's folder through a symbolic link."""
    folder = tmp_path / "digits"
    store(folder, {"model.py": source})
    weights(tmp_path / "secret.pt")
    (folder / "1" / "best.pt").symlink_to(tmp_path / "secret.pt")
    (folder / "shared").symlink_to(tmp_path)

    for name in ("best.pt", "../shared/secret.pt"):
        with pytest.raises(ConfigError, match="model's own folder"):
            discovery.find(build.config(folder, weights=name))


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    """A link to a file of the model, and a model folder that is a link, are accepted."""
    store(tmp_path / "store", {"model.py": source, "epoch7.pt": weights})
    (tmp_path / "store" / "1" / "best.pt").symlink_to("epoch7.pt")
    (tmp_path / "digits").symlink_to(tmp_path / "store")

    found = discovery.find(build.config(tmp_path / "digits", weights="best.pt"))

    assert found.weights == tmp_path / "digits" / "1" / "best.pt"


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
        ("model.safetensors", "model.pt"),
        ("model.pt", "model.pth"),
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
        pytest.param({}, {}, None, id="alone"),
        pytest.param({"model.pt2": script}, {}, None, id="files that are not sought"),
        pytest.param({"model.pt": weights}, {}, "model.pt", id="weights of the default name"),
        pytest.param(
            {"model.safetensors.index.json": raw(b"{}")},
            {},
            "model.safetensors.index.json",
            id="sharded weights",
        ),
        pytest.param({"b.pth": weights}, {"weights": "b.pth"}, "b.pth", id="named weights"),
    ],
)
def test_factory_of_a_package_needs_no_file(
    files: dict[str, Callable[[Path], None]],
    options: dict[str, Any],
    beside: str | None,
    tmp_path: Path,
) -> None:
    """A factory with a colon belongs to a package; the version folder may be empty."""
    store(tmp_path, files)
    version = tmp_path / "1"

    found = discovery.find(build.config(tmp_path, model_factory="package:Net", **options))

    assert found == Artifact(ArtifactType.FACTORY, version, version / beside if beside else None)


def test_factory_of_a_package_without_weights(tmp_path: Path) -> None:
    """WEIGHTS none also applies to the factory of a package."""
    store(tmp_path, {"model.pt": weights})

    found = discovery.find(build.config(tmp_path, model_factory="package:Net", weights="None"))

    assert found == Artifact(ArtifactType.FACTORY, tmp_path / "1", weightless=True)


def test_factory_of_the_source(tmp_path: Path) -> None:
    """A factory without a colon is a function of model.py."""
    store(tmp_path, {"model.py": source})

    found = discovery.find(build.config(tmp_path, model_factory="make"))

    assert found == Artifact(ArtifactType.MODULE, tmp_path / "1" / "model.py")


# --- FALLBACK --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "files", "kind", "beside"),
    [
        pytest.param(
            "slow.pt2", {"slow.pt2": exported}, ArtifactType.EXPORTED, None, id="exported"
        ),
        pytest.param("net.pt", {"net.pt": script}, ArtifactType.TORCHSCRIPT, None, id="jit"),
        pytest.param(
            "../slow.pt2", {"../slow.pt2": exported}, ArtifactType.EXPORTED, None, id="shared"
        ),
        pytest.param(
            "net.py",
            {"net.py": source, "net.pth": weights},
            ArtifactType.MODULE,
            "net.pth",
            id="source",
        ),
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

    found = discovery.find(build.config(tmp_path, fallback=name))

    fallback = Artifact(kind, version / name, version / beside if beside else None)
    assert found == Artifact(ArtifactType.AOTI, version / "model.pt2", fallback=fallback)


@pytest.mark.parametrize(
    ("files", "fallback", "error", "said"),
    [
        pytest.param(
            {"model.pt2": exported, "net.py": source},
            "net.py",
            ConfigError,
            ["FALLBACK is set, and the model is a torch.export program", "an AOTInductor package"],
            id="beside an exported program",
        ),
        pytest.param(
            {"model.py": source},
            "model.py",
            ConfigError,
            ["FALLBACK is set, and the model is Python source"],
            id="beside a source",
        ),
        pytest.param(
            {"model.pt2": aoti},
            "net.py",
            ArtifactError,
            ["FALLBACK is 'net.py', and version 1 has no such file"],
            id="missing",
        ),
        pytest.param(
            {"model.pt2": aoti},
            "../../net.py",
            ConfigError,
            ["FALLBACK is '../../net.py'", "a file in the model's own folder"],
            id="outside",
        ),
        pytest.param(
            {"model.pt2": aoti, "net.pt": weights},
            "net.pt",
            ArtifactError,
            ["net.pt is a state_dict: weights without code", "in net.py beside it"],
            id="no model",
        ),
    ],
)
def test_invalid_fallback(
    files: dict[str, Callable[[Path], None]],
    fallback: str,
    error: type[Exception],
    said: list[str],
    tmp_path: Path,
) -> None:
    """An invalid fallback fails the load on every machine, not only where it is used."""
    folder = tmp_path / "digits"
    store(folder, files)

    with pytest.raises(error) as raised:
        discovery.find(build.config(folder, fallback=fallback))

    assert str(raised.value).startswith("model 'digits': ")
    assert all(part in str(raised.value) for part in said)


def test_fallback_of_another_artifact(tmp_path: Path) -> None:
    """FALLBACK is rejected for other artifacts than AOTInductor packages, also for factories."""
    store(tmp_path, {"model.py": source})

    with pytest.raises(ConfigError, match="FALLBACK is set"):
        discovery.find(build.config(tmp_path, model_factory="package:Net", fallback="model.py"))


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
