"""`init`: model folders made from artifacts."""

from __future__ import annotations

import json
import shlex
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kinds
import models
import pytest
import safetensors.torch
import scenarios
import torch
from command_line import refuse, run, tree
from torch import nn

from torch_py_backend.autocomplete import completion
from torch_py_backend.config import pbtxt

_ODD = "größe 2.0 -x_y"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with artifacts, and a repository that `init` made of them."""
    folder = tmp_path_factory.mktemp("init")
    (folder / "script").mkdir()
    scenarios.script(models.Affine(), "script.pt")(folder / "script")
    scenarios.safe({"x": torch.rand(2, 4)}, "some.safetensors")(folder)
    (folder / "program.pt2").write_bytes(kinds._exported("one"))
    source = models.source(models.Affine) + kinds._EXAMPLE_FUNCTION
    (folder / "classes.py").write_text(source)
    scenarios.safe(scenarios.affine().state_dict(), "classes.safetensors")(folder)
    for arguments in (
        ("script/script.pt", "--repository=new/models", "--example=some.safetensors"),
        ("classes.py", "--repository", "new/models", "--name=classifier.v1"),
        ("program.pt2", "--repository=new/models", "--link", f"--name={_ODD}"),
    ):
        done = run("init", *arguments, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert "loads and runs" in done.stdout, done.stdout
    return folder


_FOLDERS = {
    "script": ({"model.pt", "example_inputs.safetensors"}, 8),
    "classifier.v1": ({"model.py", "model.safetensors"}, 8),
    _ODD: ({"model.pt2"}, 64),
}


@pytest.mark.parametrize("name", _FOLDERS, ids=["torchscript", "module", "exported"])
def test_init_makes_a_model_folder(workspace: Path, name: str) -> None:
    """The files have the names that are served; the config is complete, and all can read it."""
    files, size = _FOLDERS[name]
    folder = workspace / "new" / "models" / name
    assert {path.name for path in folder.parent.iterdir()} == _FOLDERS.keys()
    assert folder.stat().st_mode == (workspace / "script").stat().st_mode
    assert {path.name for path in folder.iterdir()} == {"1", "config.pbtxt"}
    assert {path.name for path in (folder / "1").iterdir()} == files
    document = pbtxt.read(folder)
    assert document["backend"] == "pytorch_py"
    assert not completion.is_incomplete(document)
    assert document["max_batch_size"] == size
    assert "dynamic_batching" in document
    inputs = [(entry["name"], entry["data_type"], entry["dims"]) for entry in document["input"]]
    assert inputs == [("x", "TYPE_FP32", [4])]
    assert [entry["dims"] for entry in document["output"]] == [[3]]
    # An option of GPUs is a comment in the config of a model on the CPU.
    assert document.get("parameters", {}) == {}
    assert "FORCE_CPU_ONLY_INPUT_TENSORS" in (folder / "config.pbtxt").read_text()


def test_init_links_or_copies(workspace: Path) -> None:
    """--link links to the file by an absolute path; without it, files are copied."""
    linked = workspace / "new" / "models" / _ODD / "1" / "model.pt2"
    assert linked.readlink() == workspace / "program.pt2"
    copied = workspace / "new" / "models" / "script" / "1" / "model.pt"
    assert not copied.is_symlink()
    assert copied.read_bytes() == (workspace / "script" / "script.pt").read_bytes()


def test_check_of_what_init_made(workspace: Path) -> None:
    """What `init` makes passes `check`, without a note."""
    done = run("check", "--json", "new/models/classifier.v1", cwd=workspace)
    (report,) = json.loads(done.stdout)["models"]
    assert report["model"] == "classifier.v1"
    assert "error" not in report, done.stdout
    assert report["notes"] == []


def test_init_of_a_package_for_cuda(tmp_path: Path) -> None:
    """The config of a package for CUDA has KIND_GPU; init says that this machine has no GPU."""
    with zipfile.ZipFile(tmp_path / "net.pt2", "w") as archive:
        archive.writestr("net/data/aotinductor/model/net.wrapper.so", "")
        metadata = "net/data/aotinductor/model/net_metadata.json"
        archive.writestr(metadata, '{"AOTI_DEVICE_KEY": "cuda"}')
    done = run("init", "net.pt2", cwd=tmp_path)
    assert "was built for device cuda (here: cpu). Serve it on such a machine" in done.stdout
    assert done.returncode == 1
    document = pbtxt.read(tmp_path / "net")
    assert [group["kind"] for group in document["instance_group"]] == ["KIND_GPU"]
    assert document["parameters"]["FORCE_CPU_ONLY_INPUT_TENSORS"] == {"string_value": "no"}


def test_init_takes_what_the_source_needs(tmp_path: Path) -> None:
    """Modules of the source's folder and the shards of its weights are served with it."""
    first, _, _ = models.source(models.Affine).partition("class ")
    source = f"{first}from layers.affine import Affine as Base\n\n\nclass Net(Base):\n    pass\n"
    scenarios.text(source + kinds._EXAMPLE_FUNCTION, "net.py")(tmp_path)
    (tmp_path / "layers").mkdir()
    scenarios.text("", "layers/__init__.py")(tmp_path)
    scenarios.text(models.source(models.Affine), "layers/affine.py")(tmp_path)
    scenarios.text("not wanted", "notes.py")(tmp_path)
    state = scenarios.affine().state_dict()
    index = {"weight_map": {key: f"net-{number}.safetensors" for number, key in enumerate(state)}}
    for key, file in index["weight_map"].items():
        scenarios.safe({key: state[key]}, file)(tmp_path)
    scenarios.text(json.dumps(index), "net.safetensors.index.json")(tmp_path)
    done = run("init", "net.py", "--link", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loads and runs" in done.stdout, done.stdout
    version = tmp_path / "net" / "1"
    files = [str(path.relative_to(version)) for path in version.rglob("*") if path.is_file()]
    taken = {"layers/__init__.py", "layers/affine.py", *index["weight_map"].values()}
    assert set(files) == taken | {"model.py", "model.safetensors.index.json"}


_EDGE = 16
_IMAGES = f"--input=x:FP32:3x{_EDGE}x{_EDGE}"


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.conv(x).mean((2, 3)))
        return scores


def _next(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the arguments of the command that `init` proposes."""
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("next:")]
    program, *arguments = shlex.split(line.removeprefix("next:"))
    assert program == "torch-py-backend"
    return arguments


def test_init_without_examples(tmp_path: Path) -> None:
    """Unknown inputs are named, with a command that continues; they determine the batch size."""
    torch.jit.trace(Classifier().eval(), torch.rand(1, 3, _EDGE, _EDGE)).save(tmp_path / "net.pt")
    done = run("init", "net.pt", cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "the types and sizes of x are not known" in done.stdout
    text = (tmp_path / "net" / "config.pbtxt").read_text()
    assert '# input [{ name: "x" data_type: TYPE_FP32 dims: [ … ] }]' in text
    assert completion.is_incomplete(pbtxt.read(tmp_path / "net"))
    assert "\nmax_batch_size" not in text

    *command, value = _next(done)
    assert value == "x:FP32:3x224x224"
    done = run(*command[:-1], _IMAGES, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loads and runs" in done.stdout
    assert _next(done) == ["serve", "."]
    document = pbtxt.read(tmp_path / "net")
    assert document["max_batch_size"] == 8
    assert document["input"][0]["dims"] == [3, _EDGE, _EDGE]
    assert document["output"][0]["dims"] == [5]


def test_init_of_weights(tmp_path: Path) -> None:
    """Weights require their class; once its file is beside them, the same command succeeds."""
    safetensors.torch.save_file(Classifier().state_dict(), tmp_path / "net.safetensors")
    text = "Write net.py beside it, with the class that it belongs to"
    refuse(text, "init", "net.safetensors", _IMAGES, cwd=tmp_path)
    scenarios.text(models.source(Classifier), "net.py")(tmp_path)
    done = run("init", "net.safetensors", _IMAGES, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "net" / "1" / "model.safetensors").is_file()


def test_init_without_weights(tmp_path: Path) -> None:
    """Without weights, the command to save them is proposed; shapes do not depend on them."""
    scenarios.text(models.source(Classifier), "net.py")(tmp_path)
    done = run("init", "net.py", _IMAGES, cwd=tmp_path)
    assert done.returncode == 1
    assert "there is no weights file beside model.py" in done.stdout
    assert "next: save the weights as net.pt" in done.stdout
    assert not completion.is_incomplete(pbtxt.read(tmp_path / "net"))
    torch.save(Classifier().state_dict(), tmp_path / "net.pt")
    refuse("or replace it with --force", "init", "net.py", _IMAGES, cwd=tmp_path)
    done = run("init", "net.py", _IMAGES, "--force", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net", "net.pt", "net.py"]


_TAKES = """
import torch


def forward(x, texts: list[str], scale: float = 1.0):
    assert texts == ["text"] * len(texts)
    return {"doubled": torch.cat([x, x], -1) * scale, "first": x[..., 0]}
"""
_ONE_ROW = """
def forward(x):
    rows, columns = x.shape
    return {"y": x.sum().reshape(1)}
"""


@pytest.mark.parametrize(
    ("source", "inputs", "rows", "outputs"),
    [
        pytest.param(
            _TAKES,
            ["x:fp32:-1", "texts:BYTES:1", "scale:TYPE_FP32:"],
            8,
            {"doubled": [-1], "first": [1]},
            id="batched",
        ),
        pytest.param(_ONE_ROW, ["x:FP32:2x3"], 0, {"y": [1]}, id="without-a-batch"),
    ],
)
def test_init_with_inputs(
    tmp_path: Path, source: str, inputs: list[str], rows: int, outputs: dict[str, list[int]]
) -> None:
    """--input describes a request; outputs and batch size are found by a trial."""
    scenarios.text(source, "net.py")(tmp_path)
    done = run("init", "net.py", *(f"--input={text}" for text in inputs), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    document = pbtxt.read(tmp_path / "net")
    assert document["max_batch_size"] == rows
    names = [entry["name"] for entry in document["input"]]
    assert names == [text.split(":")[0] for text in inputs]
    assert {entry["name"]: entry["dims"] for entry in document["output"]} == outputs


def test_init_of_a_pretrained_folder(tmp_path: Path) -> None:
    """A folder of save_pretrained loads and runs; a decoder's cache is not among its outputs."""
    transformers = pytest.importorskip("transformers")
    settings = transformers.GPT2Config(
        vocab_size=100, n_embd=16, n_layer=1, n_head=2, n_positions=32, pad_token_id=0
    )
    transformers.GPT2LMHeadModel(settings).save_pretrained(tmp_path / "gpt2-v1.0")
    done = run("init", "gpt2-v1.0", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert _next(done) == ["serve", "models"]
    document = pbtxt.read(tmp_path / "models" / "gpt2-v1.0")
    factory = document["parameters"]["MODEL_FACTORY"]["string_value"]
    assert factory == "transformers:GPT2LMHeadModel"
    inputs = [(entry["name"], entry["dims"], entry["optional"]) for entry in document["input"]]
    assert inputs[:2] == [("input_ids", [-1], False), ("attention_mask", [-1], True)]
    outputs = [(entry["name"], entry["dims"]) for entry in document["output"]]
    assert outputs == [("logits", [-1, 100])]


@pytest.mark.parametrize("architectures", [["os.system"], 7, [[]]])
def test_init_of_a_folder_that_names_no_class(tmp_path: Path, architectures: Any) -> None:
    """A config.json may name a class of transformers only."""
    folder = tmp_path / "net"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": architectures}))
    refuse("net is a folder without a config.json of transformers", "init", "net", cwd=tmp_path)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--input=x"], "--input is 'x'; expected NAME:TYPE:DIMS such as x:FP32:3x224x224"),
        (["--input=x:FLOAT:3"], "with one of the types BOOL"),
        (["--input=x:FP32:-2"], "expected NAME:TYPE:DIMS"),
        (["--input=x:FP32:3", "--example=net.py"], "give one of them"),
        (["--example=none"], "--example is none; expected a file of safetensors"),
    ],
)
def test_init_refuses(tmp_path: Path, arguments: list[str], says: str) -> None:
    """A bad --input or --example is an error, and nothing is made."""
    scenarios.text("def forward(x):\n    return x\n", "net.py")(tmp_path)
    refuse(says, "init", "net.py", *arguments, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["net.py"]


@pytest.mark.parametrize(
    ("files", "arguments", "says"),
    [
        (["net/notes.txt", "source.py"], [], "is not a model folder"),
        (["net/config.pbtxt", "net/2/model.py"], [], "the version 1 alone"),
        (["net/config.pbtxt", "net/1/net.py"], ["--link"], "--link would link to files in"),
    ],
    ids=["no-model", "versions", "link-into-itself"],
)
def test_init_replaces_nothing_else(
    tmp_path: Path, files: list[str], arguments: list[str], says: str
) -> None:
    """--force replaces only a model folder as `init` makes it."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("def forward(x):\n    return x\n")
    before = tree(tmp_path)
    done = run("init", str(tmp_path / files[-1]), "--name=net", "--force", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert says in done.stderr
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("page.pt", b"<!DOCTYPE html><html>not found</html>", "page.pt is an HTML page"),
        (
            "net.safetensors",
            safetensors.torch.save(models.Affine().state_dict()),
            "net.safetensors is safetensors: weights without code",
        ),
        ("a [red] b.pt", b"PNG", "a [red] b.pt is not a file that"),
    ],
    ids=["html", "weights", "brackets"],
)
def test_init_of_a_wrong_file(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    """A file that is no model has an error of one line; no empty repository is left."""
    (tmp_path / name).write_bytes(data)
    refuse(says, "init", name, "--repository=new/models", cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "name",
    [
        *("../evil", "/tmp/evil", "..", ".hidden"),
        *("[red]", 'a"b', "a\\b", 'a\nplatform: "x" #', "a\n", " "),
    ],
)
def test_init_stays_in_the_repository(tmp_path: Path, name: str) -> None:
    """A name that is a path, hidden, or would break the config is an error."""
    (tmp_path / "repository").mkdir()
    scenarios.text("def forward(x):\n    return x\n", "net.py")(tmp_path)
    before = tree(tmp_path)
    done = run("init", "../net.py", f"--name={name}", cwd=tmp_path / "repository")
    assert done.returncode == 1
    assert f"--name is '{name}'" in done.stderr
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "occupy",
    [
        pytest.param(lambda path: path.mkdir(), id="empty-folder"),
        pytest.param(lambda path: path.write_text("mine"), id="file"),
        pytest.param(lambda path: path.symlink_to("/no/such/model"), id="broken-link"),
    ],
)
def test_init_overwrites_nothing(tmp_path: Path, occupy: Callable[[Path], object]) -> None:
    """A path that has the model's name already is an error."""
    scenarios.text("def forward(x:\n", "net.py")(tmp_path)
    occupy(tmp_path / "taken")
    before = sorted(tmp_path.iterdir())
    refuse(f"{tmp_path / 'taken'} exists already", "init", "net.py", "--name=taken", cwd=tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_init_where_nothing_can_be_written(tmp_path: Path) -> None:
    scenarios.text("def forward(x):\n    return x\n", "net.py")(tmp_path)
    refuse("/dev/null", "init", "net.py", "--repository=/dev/null/models", cwd=tmp_path)


def test_names_and_dims_of_the_model_are_in_the_config(tmp_path: Path) -> None:
    """Tensors may have any name, and one value for each row."""
    source = """
from torch import ones


def forward(inputs: dict):
    return {name + "!": value for name, value in inputs.items()}


def example_inputs():
    return {'quote "x"': ones(2, 4), "back\\\\slash": ones(2, 3), "größe": ones(2)}
"""
    scenarios.text(source, "net.py")(tmp_path)
    done = run("init", "net.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = pbtxt.read(tmp_path / "net")
    names = ['quote "x"', "back\\slash", "größe"]
    assert [entry["name"] for entry in document["input"]] == names
    assert [entry["name"] for entry in document["output"]] == [f"{name}!" for name in names]
    for role in ("input", "output"):
        assert [entry["dims"] for entry in document[role]] == [[4], [3], [1]]
        assert [entry.get("reshape") for entry in document[role]] == [None, None, {"shape": []}]
