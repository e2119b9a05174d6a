import io
import json
import os
import pickle
import zipfile
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import build
import pytest
import safetensors.torch
import torch

from torch_py_backend.errors import ArtifactError
from torch_py_backend.loading import discovery
from torch_py_backend.loading.discovery import Artifact, ArtifactType

_Files = Mapping[str, str | bytes]


def archive(*names: str) -> bytes:
    """Return a zip archive whose members are empty."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in names:
            file.writestr(f"model/{name}", b"")
    return buffer.getvalue()


def store(folder: Path, files: _Files) -> Path:
    """Write files of version 1; return its folder."""
    for name, content in files.items():
        build.write(folder, name, content)
    return folder / "1"


source = "raise SystemExit('it is only read')\nclass Net(nn.Module): ...\n"
weights = archive("data.pkl")
script = archive("code/net.py", "constants.pkl")
exported = archive("models/model.json")
aoti = archive("data/aotinductor/model/wrapper.cpp")
_PY = {"model.py": source}
_TWO = {"net.py": source, "net.pt": weights, "model.pt": script}
_BELOW = {"sub/net.py": source, "sub/net.pth": weights}
_INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("files", "name", "kind", "found"),
    [
        (_PY, None, ArtifactType.MODULE, "model.py"),
        ({"model.pt": script}, None, ArtifactType.TORCHSCRIPT, "model.pt"),
        ({"model.pt2": aoti}, None, ArtifactType.AOTI, "model.pt2"),
        # The type follows from the bytes, not from the name.
        ({"model.pt": exported}, None, ArtifactType.EXPORTED, "model.pt"),
        # Weights beside the source.
        (_PY | {"model.pt": weights}, None, ArtifactType.MODULE, "model.py model.pt"),
        (_PY | {_INDEX: ""}, None, ArtifactType.MODULE, f"model.py {_INDEX}"),
        (_PY | {"other.pt": weights}, None, ArtifactType.MODULE, "model.py"),
        # The order of default names.
        ({"model.pt2": aoti, "model.pt": script}, None, ArtifactType.TORCHSCRIPT, "model.pt"),
        (_PY | {"model.pt2": aoti}, None, ArtifactType.MODULE, "model.py"),
        # default_model_filename.
        (_PY | {"model.pt2": aoti}, "model.pt2", ArtifactType.AOTI, "model.pt2"),
        (_TWO, "net.py", ArtifactType.MODULE, "net.py net.pt"),
        (_BELOW, "sub/net.pth", ArtifactType.MODULE, "sub/net.py sub/net.pth"),
        # Triton sets model.pt for `platform: "pytorch_libtorch"`.
        ({"model.pt2": exported}, "model.pt", ArtifactType.EXPORTED, "model.pt2"),
        (_PY | {"model.pt": weights}, "model.pt", ArtifactType.MODULE, "model.py model.pt"),
        (_PY | {"model.pt": script}, "model.pt", ArtifactType.TORCHSCRIPT, "model.pt"),
    ],
)
def test_model_is_the_named_file_else_model_py_model_pt_or_model_pt2(
    files: _Files, name: str | None, kind: ArtifactType, found: str, tmp_path: Path
) -> None:
    version = store(tmp_path, files).rename(tmp_path / "12")
    artifact = discovery.find(build.config(tmp_path, version="12", default_model_filename=name))
    model, _, beside = found.partition(" ")
    assert artifact == Artifact(kind, version / model, version / beside if beside else None)


def test_error_lists_the_existing_files_and_the_expected_names(tmp_path: Path) -> None:
    for file in ("b.txt", "a.pt", "model.py/x"):
        build.write(tmp_path, file, "")
    (tmp_path / "1" / "model.pth").symlink_to("gone.pt")
    files = r"a\.pt, b\.txt, model\.py"
    with pytest.raises(ArtifactError, match=f"version 1 holds {files}; expected model.py or model"):
        discovery.find(build.config(tmp_path))


def test_named_weights_may_be_beside_versions_and_links_within_the_model(tmp_path: Path) -> None:
    store(tmp_path / "store", _PY | {"epoch7.pt": weights, "../2/best.pt": weights})
    (tmp_path / "store" / "1" / "best.pt").symlink_to("epoch7.pt")
    (tmp_path / "digits").symlink_to(tmp_path / "store")
    for name in ("best.pt", "../2/best.pt"):
        artifact = discovery.find(build.config(tmp_path / "digits", weights=name))
        assert artifact.weights == tmp_path / "digits" / "1" / name


def test_several_weights_need_a_name(tmp_path: Path) -> None:
    names = ["model.safetensors", _INDEX, "model.pth"]
    version = store(tmp_path, _PY | dict.fromkeys(names, weights))
    with pytest.raises(ArtifactError, match=f"{' and '.join(names)}; expected one .* WEIGHTS"):
        discovery.find(build.config(tmp_path))
    assert discovery.find(build.config(tmp_path, weights=_INDEX)).weights == version / _INDEX
    assert discovery.find(build.config(tmp_path, weights="none")).weights is None


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("class Hooks(nn.Module): ...\n", "model.py"),
        # Without a module, it registers what the model needs.
        ("import torchvision\n", "model.pt"),
        ("class Net(\n    nn.Sequential,\n): ...\n", "model.py"),
        ("@op('shop::f')\ndef f(x): ...\nclass Pair(typing.NamedTuple): ...\n", "model.pt"),
        ("try:\n    class Net(PreTrainedModel): ...\nfinally: ...\n", "model.py"),
        ("def (", "model.pt"),
        ("class Kind(enum.Enum): ...\nclass F(autograd.Function): ...\n", "model.pt"),
    ],
)
def test_model_py_without_a_module_is_not_the_model(text: str, model: str, tmp_path: Path) -> None:
    version = store(tmp_path, {"model.pt": script})
    build.write(tmp_path, "model.py", text)
    artifact = discovery.find(build.config(tmp_path))
    assert artifact.path == version / model
    selected = discovery.find(build.config(tmp_path, model_class="Net"))
    assert selected.path == version / "model.py"


def test_files_of_the_weights_are_the_file_and_its_existing_shards(tmp_path: Path) -> None:
    index = '{"weight_map": {"x": "a", "y": "b", "z": "missing"}}'
    files: _Files = {"model.py": "x", "broken.json": "x", "a": "x", "b": "x", _INDEX: index}
    version = store(tmp_path, files)
    for kind, path, weights, expected in (
        (ArtifactType.MODULE, "model.py", None, ["model.py"]),
        (ArtifactType.MODULE, "model.py", _INDEX, [_INDEX, "a", "b"]),
        (ArtifactType.MODULE, "model.py", "broken.json", ["broken.json"]),
        (ArtifactType.FACTORY, "", None, ["a", "b", "broken.json", "model.py", _INDEX]),
    ):
        artifact = Artifact(kind, version / path, version / weights if weights else None)
        assert [file.name for file in artifact.weight_files()] == expected


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (archive("data.pkl", "constants.pkl"), ArtifactType.TORCHSCRIPT),
        # A user's own file in it.
        (archive("extra/models/labels.json", "code/net.py"), ArtifactType.TORCHSCRIPT),
        # A package may hold its program, too.
        (archive("models/model.json", "data/aotinductor/model/abc.so"), ArtifactType.AOTI),
        (pickle.dumps({}, protocol=2), ArtifactType.WEIGHTS),  # of torch before 1.6
        (safetensors.torch.save({"x": torch.ones(1)}), ArtifactType.WEIGHTS),
        (archive("notes.txt"), ArtifactType.UNKNOWN),
        (b"PK\x03\x04" + bytes(60), ArtifactType.UNKNOWN),
    ],
)
def test_type_follows_from_the_bytes(content: bytes, kind: ArtifactType, tmp_path: Path) -> None:
    assert discovery.file_type(build.write(tmp_path, "model.pt", content)) is kind


def _found(version: Path) -> dict[str, str]:
    """Return the files of net.py: name in the version folder → relative path."""
    files = discovery.source_files(version / "net.py")
    return {name: path.relative_to(version).as_posix() for name, path in files.items()}


_FAST = f"fast{EXTENSION_SUFFIXES[0]}"


@pytest.mark.parametrize(
    ("contents", "empty", "expected"),
    [
        (
            {
                "net.py": "import a, both, fast, broken, null, absent",
                "a.py": "# -*- coding: latin-1 -*-\ndef f():\n    import b\nfrom net import X",
                "b.py": "import a",
                _FAST: "\x7fELF",
                "broken.py": "def broken(:",
                "null.py": "x = '\0'",
            },
            "both.py both/__init__.py absent.txt",
            f"a.py net.py b.py both/__init__.py broken.py null.py {_FAST}",
        ),
        (  # packages are whole
            {
                "net.py": "from blocks.conv import X",
                "blocks/conv.py": "from . import norm\nfrom .. import outside\nimport sizes",
            },
            "blocks/__init__.py blocks/norm.py blocks/a/b blocks/__pycache__/x blocks/.x sizes.py",
            "blocks/__init__.py blocks/conv.py blocks/norm.py blocks/a/b sizes.py",
        ),
        (  # a package without __init__.py
            {"net.py": "import plain.conv", "plain/conv.py": "from .parts import x\nimport sizes"},
            "plain/parts.py plain/weights.pt sizes.py",
            "plain/conv.py plain/parts.py sizes.py",
        ),
        ({"net.py": "def broken(:"}, "a.py", ""),
    ],
)
def test_imports_are_followed_and_packages_are_whole(
    contents: dict[str, str], empty: str, expected: str, tmp_path: Path
) -> None:
    files = _found(store(tmp_path, contents | dict.fromkeys(empty.split(), "")))
    assert files.pop("model.py") == "net.py"
    assert files == {name: name for name in expected.split()}


def test_index_is_renamed_and_shards_beside_it_keep_their_names(tmp_path: Path) -> None:
    outside = os.fspath(tmp_path / "secret.safetensors")
    names = ["net-1.safetensors", "gone.safetensors", "../secret.safetensors", outside]
    index = json.dumps({"weight_map": dict(enumerate(names))})
    files = {"net.py": "", "net.safetensors.index.json": index, "net-1.safetensors": ""}
    beside = {"other.safetensors": "", "../secret.safetensors": ""}
    assert _found(store(tmp_path, files | beside)) == {
        "model.py": "net.py",
        "model.safetensors.index.json": "net.safetensors.index.json",
        "net-1.safetensors": "net-1.safetensors",
    }
