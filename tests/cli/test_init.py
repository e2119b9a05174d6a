"""`init`: model folders made from artifacts."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import zipfile
from pathlib import Path

import command_line
import kinds
import models
import pytest
import safetensors.torch
import scenarios
import torch
from command_line import refuse, run, tree

from torch_py_backend import autocomplete
from torch_py_backend.config import pbtxt
from torch_py_backend.model_folders import artifact_files
from torch_py_backend.processes import child_process

_ODD = "größe 2.0 -x_y"


@pytest.fixture(autouse=True)
def here(process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the models in this process."""
    monkeypatch.setattr(child_process, "run", command_line.here)


def _init(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Make a model folder."""
    done = run("init", *arguments, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nOK      " in done.stdout
    return done


def _artifacts(folder: Path) -> None:
    (folder / "script").mkdir()
    scenarios.script(models.Affine(), "script.pt")(folder / "script")
    scenarios.safe({"x": torch.rand(2, 4)}, "script/example_inputs.safetensors")(folder)
    (folder / "program.pt2").write_bytes(kinds._exported("one"))
    source = models.source(models.Affine) + kinds._EXAMPLE_FUNCTION
    (folder / "classes.py").write_text(source)
    scenarios.safe(scenarios.affine().state_dict(), "classes.safetensors")(folder)


@pytest.mark.parametrize(
    ("name", "arguments", "files", "size"),
    [
        (
            "script",
            ["script/script.pt"],
            {"model.pt", "example_inputs.safetensors"},
            8,
        ),
        (
            "classifier.v1",
            ["classes.py", "--name=classifier.v1"],
            {"model.py", "model.safetensors"},
            8,
        ),
        (_ODD, ["program.pt2", f"--name={_ODD}"], {"model.pt2"}, 64),
    ],
    ids=["torchscript", "module", "exported"],
)
def test_init_makes_a_model_folder(
    name: str, arguments: list[str], files: set[str], size: int, tmp_path: Path
) -> None:
    """Files are copied under the names that are served; the config is complete."""
    _artifacts(tmp_path)
    _init(tmp_path, *arguments, "--repository=new/models")
    folder = tmp_path / "new" / "models" / name
    assert [path.name for path in folder.parent.iterdir()] == [name]
    assert folder.stat().st_mode == (tmp_path / "script").stat().st_mode
    assert {path.name for path in folder.iterdir()} == {"1", "config.pbtxt"}
    assert {path.name for path in (folder / "1").iterdir()} == files
    document = pbtxt.read(folder)
    assert document["backend"] == "pytorch_py"
    assert not autocomplete.is_incomplete(document)
    assert document["max_batch_size"] == size
    assert "dynamic_batching" in document
    inputs = [(entry["name"], entry["data_type"], entry["dims"]) for entry in document["input"]]
    assert inputs == [("x", "TYPE_FP32", [4])]
    assert [entry["dims"] for entry in document["output"]] == [[3]]
    assert document.get("parameters", {}) == {}
    (report,) = json.loads(run("check", "--json", str(folder)).stdout)["models"]
    assert (report["model"], report.get("error"), report["warnings"]) == (name, None, [])


def test_init_takes_the_source_beside_a_script(tmp_path: Path) -> None:
    """A model.py without a module, which the model imports, is served with it; another is not."""
    scenarios.script(models.Affine(), "net.pt")(tmp_path)
    scenarios.text("import registers\n" + kinds._EXAMPLE_FUNCTION)(tmp_path)
    (tmp_path / "registers").mkdir()
    scenarios.text("", "registers/__init__.py")(tmp_path)
    scenarios.safe({"x": torch.rand(2, 4)}, "example_inputs.safetensors")(tmp_path)
    version = tmp_path / "net" / "1"
    taken = {"model.pt", "example_inputs.safetensors"}
    _init(tmp_path, "net.pt")
    assert {path.name for path in version.iterdir()} == taken | {"model.py", "registers"}
    assert (version / "registers" / "__init__.py").is_file()
    scenarios.python(models.Negate)(tmp_path)
    _init(tmp_path, "net.pt", "--force")
    assert {path.name for path in version.iterdir()} == taken


_INPUT = "--input=x:FP32:4"


def test_init_without_examples(tmp_path: Path) -> None:
    """Inputs that are unknown, or that the model cannot take, are refused, and nothing is made."""
    torch.jit.script(models.Affine()).save(tmp_path / "net.pt")
    says = "does not define their shapes"
    refuse(says, "init", "net.pt", cwd=tmp_path)
    refuse("cannot be multiplied", "init", "net.pt", "--input=x:FP32:5", cwd=tmp_path)
    assert not (tmp_path / "net").exists()
    done = _init(tmp_path, "net.pt", _INPUT)
    assert "\nnext: torch-py-backend serve .\nthen, with values: curl http" in done.stdout
    document = pbtxt.read(tmp_path / "net")
    assert document["max_batch_size"] == 8
    assert [document[role][0]["dims"] for role in ("input", "output")] == [[4], [3]]


def test_init_of_weights(tmp_path: Path) -> None:
    """Weights require their class, and a class its weights."""
    safetensors.torch.save_file(models.Affine().state_dict(), tmp_path / "net.safetensors")
    text = "a state_dict beside net.py, which defines its class."
    refuse(text, "init", "net.safetensors", _INPUT, cwd=tmp_path)
    scenarios.text(models.source(models.Affine), "net.py")(tmp_path)
    _init(tmp_path, "net.safetensors", _INPUT)
    assert (tmp_path / "net" / "1" / "model.safetensors").is_file()
    (tmp_path / "net.safetensors").unlink()
    text = "there is no weights file beside model.py"
    refuse(text, "init", "net.py", _INPUT, "--force", cwd=tmp_path)
    torch.save(models.Affine().state_dict(), tmp_path / "net.pt")
    refuse("--force (in Python", "init", "net.py", _INPUT, cwd=tmp_path)
    _init(tmp_path, "net.py", _INPUT, "--force")
    assert {path.name for path in tmp_path.iterdir()} == {"net", "net.pt", "net.py"}


def test_init_serves_the_class_of_the_weights(tmp_path: Path) -> None:
    scenarios.text(models.source(models.Affine, models.Negate), "nets.py")(tmp_path)
    scenarios.safe(scenarios.affine().state_dict(), "nets.safetensors")(tmp_path)
    _init(tmp_path, "nets.py", _INPUT)
    parameters = pbtxt.read(tmp_path / "nets")["parameters"]
    assert parameters["MODEL_CLASS"]["string_value"] == "Affine"
    text = "do not fit the module"
    refuse(text, "init", "nets.py", "--class=Negate", _INPUT, "--force", cwd=tmp_path)


def test_init_prints_a_request(tmp_path: Path) -> None:
    """An input of many values has a note in place of its data."""
    source = "def forward(x, large, texts: list[str], flag):\n    return x\n"
    scenarios.text(source, "net.py")(tmp_path)
    inputs = ["x:FP32:2", "large:FP32:300", "texts:BYTES:1", "flag:BOOL:"]
    command = _init(tmp_path, "net.py", *(f"--input={text}" for text in inputs)).stdout
    curl, url, _, body = shlex.split(command.rpartition("then, with values: ")[2])
    assert (curl, url) == ("curl", "http://127.0.0.1:8000/v2/models/net/infer")
    x, large, texts, flag = json.loads(body)["inputs"]
    assert (x["name"], x["datatype"], x["shape"], len(x["data"])) == ("x", "FP32", [1, 2], 2)
    assert (large["shape"], large["data"]) == ([1, 300], ["300 values"])
    assert (texts["datatype"], texts["shape"], texts["data"]) == ("BYTES", [1, 1], ["text"])
    assert (flag["datatype"], flag["shape"], flag["data"]) == ("BOOL", [1, 1], [True])


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
            ["x:FP32:-1", "texts:BYTES:1", "scale:FP32:"],
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
    _init(tmp_path, "net.py", *(f"--input={text}" for text in inputs))
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
    assert "serve models\n" in _init(tmp_path, "gpt2-v1.0").stdout
    document = pbtxt.read(tmp_path / "models" / "gpt2-v1.0")
    factory = document["parameters"]["MODEL_FACTORY"]["string_value"]
    assert factory == "transformers:GPT2LMHeadModel"
    inputs = [(entry["name"], entry["dims"], entry["optional"]) for entry in document["input"]]
    assert inputs[:2] == [("input_ids", [-1], False), ("attention_mask", [-1], True)]
    outputs = [(entry["name"], entry["dims"]) for entry in document["output"]]
    assert outputs == [("logits", [-1, 100])]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--tensors",)])
def test_init_of_a_classifier_of_texts(flags: tuple[str, ...], tmp_path: Path) -> None:
    """With its tokenizer it takes texts, else tokens that are padded; it has the labels."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "film": 2}, "[UNK]")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="[PAD]"
    )
    tokenizer.save_pretrained(tmp_path / "net")
    settings = transformers.BertConfig(
        vocab_size=3, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, pad_token_id=0, id2label={0: "bad", 1: "so-so", 2: "good"},
    )  # fmt: skip
    transformers.BertForSequenceClassification(settings).save_pretrained(tmp_path / "net")
    _init(tmp_path, "net", *flags)
    folder = tmp_path / "models" / "net"
    document = pbtxt.read(folder)
    assert (folder / "labels.txt").read_text() == "bad\nso-so\ngood\n"
    (output,) = document["output"]
    assert (output["name"], output["label_filename"]) == ("logits", "labels.txt")
    assert (folder / "1" / "hooks.py").exists() is not bool(flags)
    assert ("PAD" in document["parameters"]) is bool(flags)
    names = [entry["name"] for entry in document["input"]]
    assert names == (["input_ids", "attention_mask", "token_type_ids"] if flags else ["text"])


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_caches_of_decoders(name: str) -> None:
    """Versions of transformers name them differently."""
    assert artifact_files.pretrained_kwargs(["input_ids", name]) == {"use_cache": False}


def _archive(path: Path | io.BytesIO, files: dict[str, bytes], **model: str) -> None:
    """Write an archive as torch-model-archiver does."""
    manifest = {"modelName": "net", "handler": "base_handler", "serializedFile": "net.pt"} | model
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": manifest}))


def _weights(folder: Path) -> bytes:
    torch.save(scenarios.affine().state_dict(), folder / "weights")
    return (folder / "weights").read_bytes()


def test_init_of_an_archive(tmp_path: Path) -> None:
    """A class and its weights are served, in batches as large and as patient as in TorchServe."""
    source = (models.source(models.Affine) + kinds._EXAMPLE_FUNCTION).encode()
    settings = b"minWorkers: 2\nbatchSize: 4 # rows\nmaxBatchDelay: 50\n"
    files = {"classes.py": source, "net.pt": _weights(tmp_path), "c.yaml": settings}
    _archive(tmp_path / "net.mar", files, modelFile="classes.py", configFile="c.yaml")
    _init(tmp_path, "net.mar")
    document = pbtxt.read(tmp_path / "net")
    assert document["max_batch_size"] == 4
    assert document["dynamic_batching"]["max_queue_delay_microseconds"] == "50000"
    assert {path.name for path in (tmp_path / "net" / "1").iterdir()} == {"model.py", "model.pt"}
    # TorchScript needs the types of its inputs, as outside of an archive.
    torch.jit.script(models.Affine()).save(tmp_path / "net.pt")
    _archive(tmp_path / "script.mar", {"net.pt": (tmp_path / "net.pt").read_bytes()})
    _init(tmp_path, "script.mar", _INPUT)


def _mar(**model: str) -> bytes:
    buffer = io.BytesIO()
    _archive(buffer, {"net.pt": b""}, **model)
    return buffer.getvalue()


_SOURCE = b"def forward(x):\n    return x\n"
_WEIGHTS = safetensors.torch.save(models.Affine().state_dict())
_BAD_NAMES = (
    "../evil", "/tmp/evil", "..", ".hidden", "[red]",
    'a"b', "a\\b", " ", 'a\nplatform: "x" #', "a\n"
)  # fmt: skip
_NO_CLASS = "net is a folder without a config.json of transformers"


@pytest.mark.parametrize(
    ("files", "arguments", "says"),
    [
        ({}, ["--input=x"], "--input is 'x'; expected NAME:TYPE:DIMS such as x:FP32:3x224"),
        ({}, ["--input=x:FLOAT:3"], "with one of the types BOOL"),
        ({}, ["--example=none"], "--example was removed. Put the inputs beside the model as"),
        ({}, ["--repository=/dev/null/models"], "/dev/null"),
        *(({}, [f"--name={name}"], f"the model's name is '{name}'") for name in _BAD_NAMES),
        ({"w.safetensors": _WEIGHTS}, [], "is weights without code"),
        ({"a [red] b.pt": b"PNG"}, ["--repository=new"], "a [red] b.pt is not a PyTorch file"),
        # what the config.json of a folder names is a class of transformers
        *(
            ({"net/config.json": b'{"architectures": %b}' % value}, [], _NO_CLASS)
            for value in (b'["os.system"]', b"7", b"[[]]")
        ),
        # the path is taken, and --force replaces only a model folder as `init` makes it
        ({"net/": b""}, [], "net exists already"),
        ({"net -> /no/such": b""}, [], "net exists already"),
        ({"net/notes.txt": b""}, ["--force"], "replaces a model folder that has the version 1"),
        ({"net/config.pbtxt": b"", "net/2/model.py": b""}, ["--force"], "the version 1 alone"),
        # archives of TorchServe
        ({"net.mar": _mar(handler="my_handler.py")}, [], "a handler of its own, my_handler.py"),
        ({"net.mar": _mar(serializedFile="gone.pt")}, [], "gone.pt"),
        ({"net.mar": b"PK\3\4"}, [], "not an archive with a model file"),
    ],
)
def test_init_refuses(
    tmp_path: Path, files: dict[str, bytes], arguments: list[str], says: str
) -> None:
    """Bad options, files that are no models, names that are paths or lines, and taken folders.

    The error is one line, and nothing is made or replaced.
    """
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "net.py").write_bytes(_SOURCE)
    for name, content in files.items():
        path, _, target = (folder / name).as_posix().partition(" -> ")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if target:
            Path(path).symlink_to(target)
        elif name.endswith("/"):
            Path(path).mkdir()
        else:
            Path(path).write_bytes(content)
    model = [name for name in files if name.endswith((".pt", ".mar", ".safetensors", "net.py"))]
    model += ["net"] if "net/config.json" in files else []
    before = tree(tmp_path)
    done = run("init", *(model or ["net.py"]), *arguments, cwd=folder)
    assert (done.returncode, says in done.stderr) == (1, True), done.stderr
    assert done.stderr.count("\n") == 1 + says.count("\n")
    assert tree(tmp_path) == before
