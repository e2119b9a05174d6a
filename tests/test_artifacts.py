import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from torch_py_backend import artifacts
from torch_py_backend.artifacts import Artifact, Content, Kind
from torch_py_backend.errors import ArtifactError, ConfigError

SOURCE = "class Net: ...\n"


class Doubled(nn.Module):
    """A model of the user's own, with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.sprung),)


def save(thing: Any, **options: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(thing(), path, **options)


def script(path: Path) -> None:
    torch.jit.save(torch.jit.script(Doubled()), path)


def trace(path: Path) -> None:
    torch.jit.save(torch.jit.trace(Doubled(), torch.ones(3)), path)


def freeze(path: Path) -> None:
    torch.jit.save(torch.jit.freeze(torch.jit.script(Doubled().eval())), path)


def archive(**members: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            for name, content in members.items():
                file.writestr(f"model/{name}", content)

    return write


def compressed_in_an_unknown_way(path: Path) -> None:
    """A zip archive whose data.pkl says that it is packed with method 99."""
    archive(**{"data.pkl": b"\x80\x02}."})(path)
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        content[content.index(signature) + offset] = 99
    path.write_bytes(content)


def raw(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def many_keys(path: Path) -> None:
    """A state_dict whose index is longer than what is read of it."""
    torch.save({f"layer{number:0300d}": torch.zeros(0) for number in range(4000)}, path)


CONTENTS = [
    pytest.param(script, Content.TORCHSCRIPT, id="torch.jit.script"),
    pytest.param(trace, Content.TORCHSCRIPT, id="torch.jit.trace"),
    pytest.param(freeze, Content.TORCHSCRIPT, id="torch.jit.freeze"),
    pytest.param(save(lambda: Doubled().state_dict()), Content.STATE_DICT, id="state_dict"),
    pytest.param(
        save(lambda: Doubled().state_dict(), _use_new_zipfile_serialization=False),
        Content.STATE_DICT,
        id="legacy state_dict",
    ),
    pytest.param(many_keys, Content.STATE_DICT, id="state_dict of 4000 keys"),
    pytest.param(
        save(lambda: {"epoch": 3, "state_dict": Doubled().state_dict()}),
        Content.STATE_DICT,
        id="checkpoint",
    ),
    pytest.param(save(lambda: torch.ones(3)), Content.STATE_DICT, id="bare tensor"),
    pytest.param(save(Doubled), Content.PICKLED_MODULE, id="own module"),
    pytest.param(
        save(lambda: nn.Sequential(nn.Linear(2, 2))), Content.PICKLED_MODULE, id="torch's module"
    ),
    pytest.param(
        save(Doubled, _use_new_zipfile_serialization=False),
        Content.PICKLED_MODULE,
        id="legacy module",
    ),
    pytest.param(save(Doubled, pickle_protocol=4), Content.PICKLED_MODULE, id="protocol 4 module"),
    pytest.param(raw(b""), Content.EMPTY, id="empty"),
    pytest.param(raw(b"version https://git-lfs.github.com"), Content.UNKNOWN, id="git-lfs pointer"),
    pytest.param(raw(bytes(range(7, 250))), Content.UNKNOWN, id="random bytes"),
    pytest.param(raw(b"P"), Content.UNKNOWN, id="one byte"),
    pytest.param(
        lambda path: safetensors.torch.save_file(Doubled().state_dict(), path),
        Content.UNKNOWN,
        id="safetensors",
    ),
    pytest.param(archive(**{"notes.txt": b"hello"}), Content.UNKNOWN, id="other zip"),
    pytest.param(
        archive(**{"models/model.json": b"{}", "data/weights/weight_0": b""}),
        Content.UNKNOWN,
        id="torch.export",
    ),
    pytest.param(raw(b"PK\x03\x04" + bytes(60)), Content.TRUNCATED, id="head of a zip"),
    pytest.param(compressed_in_an_unknown_way, Content.TRUNCATED, id="unknown compression"),
]


@pytest.mark.parametrize(("write", "content"), CONTENTS)
def test_content_is_told_without_loading(
    write: Callable[[Path], None], content: Content, tmp_path: Path
) -> None:
    """What a file is, is told from its first bytes and its members, however it was saved."""
    write(tmp_path / "model.pt")

    assert artifacts.describe(tmp_path / "model.pt") is content


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("write", [script, save(lambda: Doubled().state_dict())], ids=["jit", "pt"])
def test_cut_off_archive_is_told(
    write: Callable[[Path], None], share: float, tmp_path: Path
) -> None:
    """A file whose copy was interrupted is called what it is, wherever it ends."""
    path = tmp_path / "model.pt"
    write(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    assert artifacts.describe(path) is Content.TRUNCATED


def test_damaged_index_is_told(tmp_path: Path) -> None:
    """A flipped byte in the archive's index of tensors is noticed by its checksum."""
    path = tmp_path / "model.pt"
    torch.save(Doubled().state_dict(), path)
    content = bytearray(path.read_bytes())
    content[content.index(b"_rebuild_tensor_v2")] ^= 0xFF
    path.write_bytes(content)

    assert artifacts.describe(path) is Content.TRUNCATED


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(torch.save, id="torch.save"),
        pytest.param(lambda trap, path: torch.save({"weight": trap}, path), id="in a state_dict"),
        pytest.param(
            lambda trap, path: torch.save(trap, path, _use_new_zipfile_serialization=False),
            id="legacy",
        ),
        pytest.param(lambda trap, path: torch.save(trap, path, pickle_protocol=4), id="protocol 4"),
        pytest.param(lambda trap, path: path.write_bytes(pickle.dumps(trap)), id="pickle"),
    ],
)
def test_nothing_is_unpickled(write: Callable[[Trap, Path], Any], tmp_path: Path) -> None:
    """Telling what a file is runs no code that lies in it."""
    sprung = tmp_path / "sprung"
    path = build.write(tmp_path, "model.pt", "")
    write(Trap(sprung), path)

    artifacts.describe(path)
    with pytest.raises(ArtifactError):
        artifacts.find(build.config(tmp_path))

    assert not sprung.exists()
    with path.open("rb") as file:  # the trap does work
        if file.read(2) == b"\x80\x04":
            pickle.loads(path.read_bytes())
        else:
            torch.load(path, weights_only=False)
    assert sprung.is_dir()


def test_source_is_not_run(tmp_path: Path) -> None:
    """Finding model.py does not import it."""
    build.write(tmp_path, "model.py", "raise SystemExit('run')\n")

    assert artifacts.find(build.config(tmp_path)).kind is Kind.MODULE


# --- which file ------------------------------------------------------------------------------


def weights(path: Path) -> None:
    torch.save(Doubled().state_dict(), path)


def source(path: Path) -> None:
    path.write_text(SOURCE, encoding="utf-8")


def store(folder: Path, files: dict[str, Callable[[Path], None]]) -> None:
    for name, write in files.items():
        write(build.write(folder, name, ""))


@pytest.mark.parametrize(
    ("files", "named", "kind", "model", "beside"),
    [
        pytest.param({"model.py": source}, None, Kind.MODULE, "model.py", None, id="source"),
        pytest.param({"model.pt": script}, None, Kind.TORCHSCRIPT, "model.pt", None, id="jit"),
        pytest.param(
            {"model.py": source, "model.pt": weights},
            None,
            Kind.MODULE,
            "model.py",
            "model.pt",
            id="source and .pt",
        ),
        pytest.param(
            {"model.py": source, "model.pth": weights},
            None,
            Kind.MODULE,
            "model.py",
            "model.pth",
            id="source and .pth",
        ),
        pytest.param(
            {"model.py": source, "model.safetensors": weights},
            None,
            Kind.MODULE,
            "model.py",
            "model.safetensors",
            id="source and .safetensors",
        ),
        pytest.param(
            {"model.py": source, "other.pt": weights},
            None,
            Kind.MODULE,
            "model.py",
            None,
            id="another file's weights",
        ),
        pytest.param(
            {"net.pt": script, "model.py": source},
            "net.pt",
            Kind.TORCHSCRIPT,
            "net.pt",
            None,
            id="named jit",
        ),
        pytest.param(
            {"net.py": source, "net.pt": weights, "model.pt": script},
            "net.py",
            Kind.MODULE,
            "net.py",
            "net.pt",
            id="named source",
        ),
        pytest.param(
            {"net.py": source, "net.pt": weights},
            "net.pt",
            Kind.MODULE,
            "net.py",
            "net.pt",
            id="named weights with their source",
        ),
        pytest.param(
            {"sub/net.py": source, "sub/net.pth": weights},
            "sub/net.py",
            Kind.MODULE,
            "sub/net.py",
            "sub/net.pth",
            id="in a folder",
        ),
        # What Triton fills in for `platform: "pytorch_libtorch"`:
        pytest.param(
            {"model.py": source}, "model.pt", Kind.MODULE, "model.py", None, id="filled in, source"
        ),
        pytest.param(
            {"model.py": source, "model.pt": weights},
            "model.pt",
            Kind.MODULE,
            "model.py",
            "model.pt",
            id="filled in, source and weights",
        ),
        pytest.param(
            {"model.py": source, "model.pt": script},
            "model.pt",
            Kind.TORCHSCRIPT,
            "model.pt",
            None,
            id="filled in, jit",
        ),
    ],
)
def test_model_file_is_found(
    files: dict[str, Callable[[Path], None]],
    named: str | None,
    kind: Kind,
    model: str,
    beside: str | None,
    tmp_path: Path,
) -> None:
    """The named file, else model.py, else model.pt, is the model; weights share its stem."""
    store(tmp_path, files)
    version = tmp_path / "1"

    found = artifacts.find(build.config(tmp_path, default_model_filename=named))

    assert found == Artifact(kind, version / model, version / beside if beside else None)


def test_model_file_is_found_in_its_own_version(tmp_path: Path) -> None:
    """Each version is served from its own folder."""
    build.write(tmp_path, "model.py", SOURCE)
    (tmp_path / "1").rename(tmp_path / "12")

    found = artifacts.find(build.config(tmp_path, version="12"))

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
        pytest.param(["model.py/x"], None, ["expected model.py or model.pt"], id="a folder"),
    ],
)
def test_missing_model_file_is_told(
    files: list[str], named: str | None, said: list[str], tmp_path: Path
) -> None:
    """Where no model is found, the files that are there and those that were sought are listed."""
    for name in files:
        build.write(tmp_path, name, "")

    with pytest.raises(ArtifactError) as raised:
        artifacts.find(build.config(tmp_path, default_model_filename=named))

    assert str(raised.value).startswith("model 'digits': version 1 holds ")
    assert all(part in str(raised.value) for part in said)


def test_missing_version_folder_is_told(tmp_path: Path) -> None:
    """A version without a folder is an error like an empty one."""
    with pytest.raises(ArtifactError, match="version 3 holds no files"):
        artifacts.find(build.config(tmp_path, version="3"))


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
def test_what_cannot_be_served_is_told(
    write: Callable[[Path], None], said: str, cure: str, tmp_path: Path
) -> None:
    """A file that is no model is called what it is, and the way out fits its name."""
    store(tmp_path, {"net.pt": write, "model.py": source})

    with pytest.raises(ArtifactError) as raised:
        artifacts.find(build.config(tmp_path, default_model_filename="net.pt"))

    assert f"'digits': net.pt {said}" in str(raised.value)
    assert "expected TorchScript, or a" in str(raised.value)
    assert cure in str(raised.value)


# --- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["none", "None", "NONE"])
def test_no_weights_are_wanted(word: str, tmp_path: Path) -> None:
    """With WEIGHTS none the files beside the source do not matter, not even several."""
    store(tmp_path, {"model.py": source, "model.pt": weights, "model.pth": weights})

    found = artifacts.find(build.config(tmp_path, weights=word))

    assert found == Artifact(Kind.MODULE, tmp_path / "1" / "model.py", None, weightless=True)


@pytest.mark.parametrize("name", ["best.pt", "sub/best.pth", "../best.safetensors", "../2/best.pt"])
def test_weights_may_lie_anywhere_in_the_models_folder(name: str, tmp_path: Path) -> None:
    """A named file is taken, also from a folder that all versions share."""
    store(tmp_path, {"model.py": source, "model.pt": weights, name: weights})

    found = artifacts.find(build.config(tmp_path, weights=name))

    assert found.weights is not None
    assert found.weights.samefile(tmp_path / "1" / name)


@pytest.mark.parametrize(
    "name", ["../../secret.pt", "{outside}/secret.pt", "../../digits2/w.pt", "/etc/passwd"]
)
@pytest.mark.parametrize("there", [True, False], ids=["there", "missing"])
def test_weights_outside_the_models_folder_are_refused(
    name: str, there: bool, tmp_path: Path
) -> None:
    """A name that leaves the model's folder is refused, whether there is such a file or not."""
    folder = tmp_path / "digits"
    store(folder, {"model.py": source})
    (tmp_path / "digits2").mkdir()
    name = name.format(outside=tmp_path)
    if there and not name.startswith("/etc"):
        weights(folder / "1" / name)

    with pytest.raises(ConfigError) as raised:
        artifacts.find(build.config(folder, weights=name))

    assert f"'digits': WEIGHTS is '{name}'" in str(raised.value)
    assert "expected a file in the model's own folder" in str(raised.value)


def test_weights_behind_a_link_that_leaves_the_folder_are_refused(tmp_path: Path) -> None:
    """A symbolic link does not open the rest of the disk to the parameter WEIGHTS."""
    folder = tmp_path / "digits"
    store(folder, {"model.py": source})
    weights(tmp_path / "secret.pt")
    (folder / "1" / "best.pt").symlink_to(tmp_path / "secret.pt")
    (folder / "shared").symlink_to(tmp_path)

    for name in ("best.pt", "../shared/secret.pt"):
        with pytest.raises(ConfigError, match="model's own folder"):
            artifacts.find(build.config(folder, weights=name))


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    """A link to a file of the model, and a model folder that is itself a link, are fine."""
    store(tmp_path / "store", {"model.py": source, "epoch7.pt": weights})
    (tmp_path / "store" / "1" / "best.pt").symlink_to("epoch7.pt")
    (tmp_path / "digits").symlink_to(tmp_path / "store")

    found = artifacts.find(build.config(tmp_path / "digits", weights="best.pt"))

    assert found.weights == tmp_path / "digits" / "1" / "best.pt"


@pytest.mark.parametrize("name", ["best.pt", "folder", "broken.pt"])
def test_missing_weights_are_told(name: str, tmp_path: Path) -> None:
    """A name that leads to no file is refused, with the way out."""
    store(tmp_path, {"model.py": source, "model.pt": weights})
    (tmp_path / "1" / "folder").mkdir()
    (tmp_path / "1" / "broken.pt").symlink_to("nothing")

    with pytest.raises(ArtifactError) as raised:
        artifacts.find(build.config(tmp_path, weights=name))

    assert f"'digits': WEIGHTS is '{name}', and version 1 has no such file" in str(raised.value)
    assert "use `none`" in str(raised.value)


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors", "model.pt"),
        ("model.pt", "model.pth"),
        ("model.safetensors", "model.pt", "model.pth"),
    ],
    ids=" ".join,
)
def test_several_weights_need_a_name(names: tuple[str, ...], tmp_path: Path) -> None:
    """Two files that could be the weights are told, and the parameter WEIGHTS decides."""
    store(tmp_path, {"model.py": source, **dict.fromkeys(names, weights)})

    with pytest.raises(ArtifactError) as raised:
        artifacts.find(build.config(tmp_path))
    named = artifacts.find(build.config(tmp_path, weights=names[1]))

    assert f"version 1 holds {' and '.join(names)}; expected one file" in str(raised.value)
    assert "WEIGHTS" in str(raised.value)
    assert named.weights == tmp_path / "1" / names[1]
