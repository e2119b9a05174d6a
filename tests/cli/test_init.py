import io
import json
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import kinds
import models
import pytest
import safetensors.torch
import scenarios
import torch
from command_line import run, tree

from torch_py_backend.config import pbtxt
from torch_py_backend.model_folders import artifact_files

pytestmark = pytest.mark.usefixtures("here")
_INPUT = "--input=x:FP32:4"


def _init(folder: Path, *arguments: str) -> str:
    """Make a model folder; return what is printed."""
    done = run("init", *arguments, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nOK      " in done.stdout
    return done.stdout


def _mar(files: dict[str, bytes], **model: str) -> bytes:
    """An archive as torch-model-archiver writes it."""
    manifest = {"modelName": "net", "handler": "base_handler", "serializedFile": "net.pt"} | model
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": manifest}))
    return buffer.getvalue()


def _written(write: Callable[[Any, io.BytesIO], None], value: object) -> bytes:
    buffer = io.BytesIO()
    write(value, buffer)
    return buffer.getvalue()


_SCRIPT = _written(torch.jit.save, torch.jit.script(models.Affine()))
_STATE = models.Affine().state_dict()
_WEIGHTS = safetensors.torch.save(_STATE)
_NETS = models.source(models.Affine, models.Negate).encode()
_CLASS = (models.source(models.Affine) + kinds._EXAMPLE_FUNCTION).encode()
_EXAMPLE = safetensors.torch.save({"x": torch.rand(2, 4)})
_SETTINGS = b"minWorkers: 2\nbatchSize: 4 # rows\nmaxBatchDelay: 50\n"
_OLD = {"classes.py": _CLASS, "net.pt": _written(torch.save, _STATE), "c.yaml": _SETTINGS}
_ARTIFACTS = {
    "script/script.pt": _SCRIPT,
    "script/example_inputs.safetensors": _EXAMPLE,
    "bare.pt": _SCRIPT,
    "classes.py": _CLASS,
    "classes.safetensors": _WEIGHTS,
    "nets.py": _NETS,
    "nets.safetensors": _WEIGHTS,
    "net.mar": _mar(_OLD, modelFile="classes.py", configFile="c.yaml"),
    "script.mar": _mar({"net.pt": _SCRIPT}),
}


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Write files; folders by names that end with a slash, and links by arrows."""
    for name, content in files.items():
        path, _, target = (folder / name).as_posix().partition(" -> ")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if target:
            Path(path).symlink_to(target)
        elif name.endswith("/"):
            Path(path).mkdir()
        else:
            Path(path).write_bytes(content)


@pytest.mark.parametrize(
    ("command", "files", "size", "more"),
    [
        ("script/script.pt", "example_inputs.safetensors model.pt", 8, {}),
        (f"bare.pt {_INPUT}", "model.pt", 8, {}),
        ("program.pt2 '--name=größe2.0-x_y'", "model.pt2", 64, {}),
        ("classes.safetensors", "model.py model.safetensors", 8, {}),
        ("classes.py --name=a.v1", "model.py model.safetensors", 8, {}),
        # the class of several whose keys the weights have
        (f"nets.py {_INPUT}", "model.py model.safetensors", 8, {"MODEL_CLASS": "Affine"}),
        # batches as large as in TorchServe
        ("net.mar", "model.pt model.py", 4, {}),
        (f"script.mar {_INPUT}", "model.pt", 8, {}),
    ],
)
def test_files_have_the_names_that_are_served_and_the_config_is_complete(
    command: str, files: str, size: int, more: dict[str, str], tmp_path: Path
) -> None:
    _write(tmp_path, _ARTIFACTS)
    if command.startswith("program"):
        shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
        program = torch.export.export(models.Affine(), (torch.rand(2, 4),), dynamic_shapes=shapes)
        torch.export.save(program, tmp_path / "program.pt2")
    name = command.partition("--name=")[2].strip("'") or Path(command.split(maxsplit=1)[0]).stem
    _init(tmp_path, *shlex.split(command), "--repository=new/models")
    folder = tmp_path / "new" / "models" / name
    assert [path.name for path in folder.parent.iterdir()] == [name]
    assert folder.stat().st_mode == (tmp_path / "script").stat().st_mode
    assert {path.name for path in folder.iterdir()} == {"1", "config.pbtxt"}
    assert sorted(path.name for path in (folder / "1").iterdir()) == files.split()
    document = pbtxt.read(folder)
    assert document["backend"] == "pytorch_py"
    delay = document["dynamic_batching"]["max_queue_delay_microseconds"]
    assert delay == ("50000" if name == "net" else "0")
    assert build.described(document) == f"x [4] → OUTPUT__0 [3] ({size})"
    assert document.get("parameters", {}) == pbtxt.parameters(more)
    (report,) = json.loads(run("check", "--json", str(folder)).stdout)["models"]
    assert (report["model"], report.get("error"), report["warnings"]) == (name, None, [])


def test_model_py_without_a_module_beside_a_script_is_served_with_it(tmp_path: Path) -> None:
    source = ("import registers\n" + kinds._EXAMPLE_FUNCTION).encode()
    files = {"net.pt": _SCRIPT, "model.py": source, "registers/__init__.py": b""}
    _write(tmp_path, files | {"example_inputs.safetensors": _EXAMPLE})
    version = tmp_path / "net" / "1"
    taken = {"model.pt", "example_inputs.safetensors"}
    _init(tmp_path, "net.pt")
    assert {path.name for path in version.iterdir()} == taken | {"model.py", "registers"}
    assert (version / "registers" / "__init__.py").is_file()
    scenarios.python(models.Negate)(tmp_path)  # another model
    _init(tmp_path, "net.pt", "--force")
    assert {path.name for path in version.iterdir()} == taken


def test_outputs_and_batch_are_found_by_a_trial_and_a_request_to_paste_is_printed(
    tmp_path: Path,
) -> None:
    """It has a note in place of many values, and is left out for types that JSON does not have."""
    source = b"def forward(x, large, texts: list[str], flag):\n    return x, x[..., 0]\n"
    one_row = b"def forward(x):\n    rows, columns = x.shape\n    return x.sum().reshape(1)\n"
    _write(tmp_path, {"net.py": source, "one.py": one_row})
    inputs = ["x:FP32:-1", "large:FP32:300", "texts:STRING:1", "flag:BOOL:"]
    printed = _init(tmp_path, "net.py", *(f"--input={text}" for text in inputs))
    described = "x [-1], large [300], texts STRING [1], flag BOOL [] → OUTPUT__0 [-1], OUTPUT__1 []"
    assert build.described(pbtxt.read(tmp_path / "net")) == f"{described} (8)"
    before, _, command = printed.rpartition("then, with values: ")
    assert before.endswith("\nnext: torch-py-backend serve .\n")
    curl, url, _, body = shlex.split(command)
    assert (curl, url) == ("curl", "http://127.0.0.1:8000/v2/models/net/infer")
    x, *others = json.loads(body)["inputs"]
    numbers = x.pop("data")
    assert x == {"name": "x", "datatype": "FP32", "shape": [1, 8]}
    assert numbers == [round(number, 4) for number in numbers]
    assert len(numbers) == 8
    assert others == [
        {"name": "large", "datatype": "FP32", "shape": [1, 300], "data": ["300 values"]},
        {"name": "texts", "datatype": "BYTES", "shape": [1, 1], "data": ["text"]},
        {"name": "flag", "datatype": "BOOL", "shape": [1, 1], "data": [True]},
    ]
    assert "then," not in _init(tmp_path, "one.py", "--input=x:FP16:2x3")
    described = "x FP16 [2, 3] → OUTPUT__0 FP16 [1] (0)"
    assert build.described(pbtxt.read(tmp_path / "one")) == described


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_caches_of_decoders(name: str) -> None:
    """Versions of transformers name them differently."""
    assert artifact_files.pretrained_kwargs(["input_ids", name]) == {"use_cache": False}


_CENTERED = b"def forward(x):\n    return x - x.mean(0)\n"
_BAD_NAMES = (
    "../evil", "/tmp/evil", "..", ".hidden", "[red]", "a b",
    'a"b', "a\\b", " ", 'a\nplatform: "x" #', "a\n"
)  # fmt: skip
_NO_CLASS = "net is a folder without a config.json of transformers"


@pytest.mark.parametrize(
    ("files", "arguments", "says"),
    [
        ({}, ["--input=x"], "--input is 'x'; expected NAME:TYPE:DIMS such as x:FP32:3x224"),
        ({}, ["--input=x:FLOAT:3"], "with one of the types BOOL"),
        ({}, ["--input=:FP32:2"], "--input is ':FP32:2'; expected NAME:"),
        ({}, ["--example=none"], "--example was removed. Put the inputs beside the model as"),
        ({}, ["--repository=/dev/null/models"], "/dev/null"),
        *(({}, [f"--name={name}"], f"the model's name is '{name}'") for name in _BAD_NAMES),
        ({"w.safetensors": _WEIGHTS}, [], "is weights without code"),
        ({"a [red] b.pt": b"PNG"}, ["--repository=new"], "a [red] b.pt is not a PyTorch file"),
        # inputs that are unknown, or do not fit; classes and weights that do not
        ({"net.pt": _SCRIPT}, [], "does not define their shapes"),
        ({"net.pt": _SCRIPT}, ["--input=x:FP32:5"], "cannot be multiplied"),
        ({"net.py": _CENTERED}, [_INPUT], "rows that do not depend on each other"),
        ({"net.py": _NETS}, ["--class=Affine", _INPUT], "there is no weights file beside model.py"),
        ({"net.py": _NETS}, [_INPUT], "model.py defines Affine, Negate"),
        (
            {"net.py": _NETS, "net.safetensors": _WEIGHTS},
            ["--class=Negate", _INPUT],
            "do not fit the module",
        ),
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
        ({"net.mar": _mar({"net.pt": b""}, handler="my.py")}, [], "a handler of its own, my.py"),
        ({"net.mar": _mar({}, serializedFile="gone.pt")}, [], "gone.pt"),
        ({"net.mar": b"PK\3\4"}, [], "not an archive with a model file"),
    ],
)
def test_refusal_is_one_line_and_nothing_is_made_or_replaced(
    tmp_path: Path, files: dict[str, bytes], arguments: list[str], says: str
) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    _write(folder, {"net.py": b"def forward(x):\n    return x\n"} | files)
    model = [name for name in files if name.endswith((".pt", ".mar", ".safetensors"))]
    model += ["net"] if "net/config.json" in files else ["net.py"]
    before = tree(tmp_path)
    done = run("init", model[0], *arguments, cwd=folder)
    assert (done.returncode, says in done.stderr) == (1, True), done.stderr
    assert done.stderr.count("\n") == 1 + says.count("\n")
    assert tree(tmp_path) == before
