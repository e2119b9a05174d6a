"""The command line: what it prints and how it exits; `tests/live/test_serve.py` runs servers."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kinds
import models
import packed
import pytest
import safetensors.torch
import scenarios
import torch
import typer
from rich.console import Console
from torch import nn

from torch_py_backend import __version__
from torch_py_backend.autocomplete import completion
from torch_py_backend.cli.check import check
from torch_py_backend.cli.pack import pack
from torch_py_backend.config import pbtxt
from torch_py_backend.errors import PackError, ServerError
from torch_py_backend.processes import child_process
from torch_py_backend.server import preflight, server_arguments, tritonserver
from torch_py_backend.server.healing import EventKind
from torch_py_backend.server.supervision import Event

# `cli.serve` is the command; what stands beside it is in the module of the same name.
serve = importlib.import_module("torch_py_backend.cli.serve")
_APP = "from torch_py_backend.cli import app; app()"


def _run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _APP, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=os.environ | {"COLUMNS": "200", "TERM": "dumb"},
    )


def test_install_twice_and_uninstall(tmp_path: Path) -> None:
    """Installing may be repeated; removing leaves nothing."""
    for _ in range(2):
        done = _run("install", f"--backend-dir={tmp_path}", "--create")
        assert done.stdout == f"installed {tmp_path / 'pytorch_py'}\n", done.stderr
        assert done.returncode == 0
    assert (tmp_path / "pytorch_py" / "model.py").is_file()
    done = _run("install", f"--backend-dir={tmp_path}", "--uninstall")
    assert done.stdout == f"removed {tmp_path / 'pytorch_py'}\n"
    assert list(tmp_path.iterdir()) == []
    done = _run("install", f"--backend-dir={tmp_path}", "--uninstall")
    assert "nothing to remove" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("told", [True, False], ids=["told", "found"])
def test_pack(told: bool, tmp_path: Path) -> None:
    """What was packed, and the line for config.pbtxt; the stub's Python is told, or found here."""
    packed.make(tmp_path / "env", layer=True)
    python = [f"--python={packed.PYTHON}"] if told else []
    done = _run("pack", "env", *python, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    archive, versions, _, line, layer = done.stdout.splitlines()
    assert archive.startswith(f"packed {tmp_path / 'env.tar.gz'}: 0.0 MB, unpacked ")
    assert "torch 2.13.0+cpu, numpy 1.26.4, safetensors" in versions
    assert 'string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz"' in line
    assert str(Path(sys.base_prefix)) in layer
    assert {one.name for one in tmp_path.iterdir()} == {"env", "env.tar.gz"}


def test_pack_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no server is installed, the Python must be told."""

    def find() -> tritonserver.TritonInstallation:
        raise ServerError("there is none.")

    monkeypatch.setattr(tritonserver, "find", find)
    with pytest.raises(PackError, match=r"is not known: there is none\. Or name it: --python"):
        pack(Path("env"))


@pytest.mark.parametrize("exists", [True, False], ids=["another-folder", "no-folder"])
def test_install_where_no_server_looks(exists: bool, tmp_path: Path) -> None:
    """A folder that is no backend directory is refused, and nothing is made; --create makes it."""
    folder = tmp_path / "backends"
    if exists:
        folder.mkdir()
    done = _run("install", f"--backend-dir={folder}")
    assert done.returncode == 1
    assert "expected the backend directory of a tritonserver" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.rglob("*")) == ([folder] if exists else [])
    assert _run("install", f"--backend-dir={folder}", "--create").returncode == 0
    assert (folder / "pytorch_py" / "model.py").is_file()


def test_install_beside_the_python_backend(tmp_path: Path) -> None:
    """A tritonserver's backend directory is told by its Python backend."""
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "libtriton_python.so").write_bytes(b"")
    assert _run("install", f"--backend-dir={tmp_path}").returncode == 0


def test_drop_in_beside_the_libtorch_backend(tmp_path: Path) -> None:
    """Triton would prefer the library: one sentence, exit code 1, nothing written."""
    (tmp_path / "pytorch").mkdir()
    (tmp_path / "pytorch" / "libtriton_pytorch.so").write_bytes(b"")
    done = _run("install", f"--backend-dir={tmp_path}", "--name=pytorch", "--create")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "libtriton_pytorch.so" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["pytorch", "libtriton_pytorch.so"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "/no/such/repository"], "/no/such/repository is not a folder"),
        (["serve", ".", "--tritonserver=/no/server"], "/no/server is not a file"),
        (
            ["serve", ".", "--allow-empty", "--http-port=99999"],
            "--http-port is 99999; expected a port from 0",
        ),
        (["serve", ".", "--", "--load-model=m"], "has no model 'm'; its models: "),
        (["install", "--backend-dir=/no/backends"], "/no/backends is not a folder; expected the"),
        (["install", "--backend-dir=/dev/null/x", "--create"], "cannot install into /dev/null/x"),
        (["check", "/no/such/models"], "/no/such/models is not a folder"),
        (["check", "/dev/null"], "/dev/null is not a folder"),
        (["init", "/no/such/model.pt"], "/no/such/model.pt is not there"),
        (["pack", "/no/env", "--python=3.11"], "/no/env is no environment"),
        (["pack", ".", "--python=py3"], "--python is 'py3'; expected a version such as 3.12"),
        (["init", "/"], "/ is a folder without a config.json of transformers"),
        pytest.param(
            ["check", "/no/[extra]/[/x]"],
            "/no/[extra]/[/x] is not a folder",
        ),
        (["bench", "/no/such/models", "m"], "'/no/such/models' is neither a folder nor an address"),
        (["bench", "localhost:8001", "m"], "grpc://host:port or http://host:port"),
        (["bench", "ftp://localhost:8001", "m"], "grpc://host:port or http://host:port"),
        (["bench", ".", "m"], "has no model 'm'; its models: "),
        (["bench", ".", "m", "--rate=1", "--concurrency=1"], "are both given"),
        (["bench", ".", "m", "--rate=0"], "--rate is '0'; expected numbers above 0"),
        (["bench", ".", "m", "--rate=nan"], "--rate is 'nan'"),
        (["bench", ".", "m", "--concurrency=1,,2"], "--concurrency is '1,,2'; expected integers"),
        (["bench", ".", "m", "--concurrency=1.5"], "--concurrency is '1.5'"),
        (["bench", ".", "m", "--duration=0"], "--duration is 0; expected more than 0 seconds"),
        (["bench", ".", "m", "--warmup=-1"], "--warmup is -1; expected 0 or more seconds"),
        (["bench", ".", "m", "--protocol=tcp"], "--protocol is 'tcp'; expected grpc or http"),
        (["bench", "http://h:1", "m", "--protocol=grpc"], "--protocol is grpc, and http://h:1"),
        (["bench", ".", "m", "--json=/no/such/a.json"], "cannot write /no/such/a.json: No such"),
        (["bench", ".", "m", "--json=/"], "cannot write /: it is a folder"),
    ],
    ids=[
        "repository",
        "server",
        "port",
        "missing-model",
        "backend-dir",
        "backend-dir-is-a-file",
        "check-nothing",
        "check-a-file",
        "init-nothing",
        "pack-nothing",
        "pack-python",
        "init-a-folder",
        "brackets",
        "bench-nothing",
        "bench-no-scheme",
        "bench-other-scheme",
        "bench-model",
        "bench-two-loads",
        "bench-no-rate",
        "bench-rate-nan",
        "bench-concurrency-gap",
        "bench-half-concurrency",
        "bench-duration",
        "bench-warmup",
        "bench-protocol",
        "bench-two-protocols",
        "bench-json",
        "bench-json-folder",
    ],
)
def test_refusals(arguments: list[str], says: str) -> None:
    """A refusal is one line on standard error and exit code 1."""
    done = _run(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("models/net", "models/net is a model; expected the repository that holds it: "),
        ("empty", "empty holds no models; expected folders with a config.pbtxt."),
    ],
)
def test_serve_of_a_folder_that_is_no_repository(folder: str, says: str, tmp_path: Path) -> None:
    """What can serve nothing is refused before a server starts."""
    (tmp_path / "models" / "net" / "1").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    done = _run("serve", folder, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {says}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_version() -> None:
    """The version is the package's."""
    done = _run("--version")
    assert done.returncode == 0
    assert done.stdout == f"torch-py-backend {__version__}\n"


def test_help_names_the_commands() -> None:
    """Help lists every command."""
    done = _run("--help")
    assert done.returncode == 0
    for command in ("serve", "init", "check", "install", "bench"):
        assert f" {command} " in done.stdout


# --- check -----------------------------------------------------------------------------------

_NEGATE = models.source(models.Negate)
_COMPLETE = scenarios.x_to_y()
_BARE = 'backend: "pytorch_py"\n'
_GAPS = (
    _NEGATE
    + """

def example_inputs():
    return {"x": torch.rand(2, 4)}
"""
)
_HANGS = (
    _NEGATE
    + """

def example_inputs():
    while True:
        pass
"""
)
# Whatever it does when it is imported, it can be served.
_NOISY = (
    """
import os
import tempfile

print("x" * 2_000_000)
print('{"models": []}')
os.write(1, b"written")
for number in (0, 1):
    os.close(number)
if os.fork() == 0:
    os._exit(9)
os.chdir(tempfile.gettempdir())
"""
    + _NEGATE
)
_RAISES = """
from helper import refuse
from torch import Tensor, nn


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return refuse(x)


def example_inputs():
    import torch

    return {"x": torch.rand(2, 4)}
"""
_REFUSE = """
import torch


def refuse(x):
    return torch.relu(x) @ torch.ones(3, 2)
"""
_LIMIT = 'parameters { key: "AUTO_COMPLETE_TIMEOUT_S" value { string_value: "1" } }\n'
_MODELS: dict[str, tuple[str | bytes, str]] = {
    "good": (_COMPLETE, _NEGATE),
    "gaps [red] ü": (_BARE, _GAPS),
    "noisy": (_COMPLETE, _NOISY),
    "no_backend": (_COMPLETE.replace(_BARE, ""), _NEGATE),
    "misspelt": (_COMPLETE.replace("pytorch_py", "pytorch-py"), _NEGATE),
    "other": ('backend: "python"\n', _NEGATE),
    "typo": (_COMPLETE + _LIMIT.replace("AUTO", "AUTOMATIC"), _NEGATE),
    "broken_config": ('backend: "pytorch_py"\ninput [{ name: }]\n', _NEGATE),
    "latin": ("# café\n".encode("latin-1"), _NEGATE),
    "broken_source": (_COMPLETE, "def broken(:\n"),
    "exits": (_COMPLETE, "import os\n\nos._exit(7)\n"),
    "hangs": (_BARE + _LIMIT, _HANGS),
    "no_versions": (_COMPLETE, ""),
    "raises": (_COMPLETE, _RAISES),
    "raises_in_completion": (_BARE, _RAISES),
}


def _lay_out(repository: Path, *names: str) -> Path:
    for name in names:
        text, source = _MODELS[name]
        (repository / name / "1").mkdir(parents=True)
        content = text.encode() if isinstance(text, str) else text
        (repository / name / "config.pbtxt").write_bytes(content)
        (repository / name / "1" / "model.py").write_text(source)
        if source == _RAISES:
            (repository / name / "1" / "helper.py").write_text(_REFUSE)
        if not source:
            (repository / name / "1" / "model.py").unlink()
            (repository / name / "1").rmdir()
    return repository


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `check --json` prints on a repository of good and of broken models."""
    folder = tmp_path_factory.mktemp("check")
    repository = _lay_out(folder / "repository", *_MODELS)
    (repository / "notes.txt").write_text("no model")
    (repository / "broken link").symlink_to("/no/such/model")
    done = _run("check", "--json", "repository", cwd=folder)
    assert done.returncode == 1, done.stderr[-2000:]
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_check_reports_every_model(report: dict[str, Any]) -> None:
    """One broken model does not keep the others from being tried; standard output is JSON alone."""
    assert [one["model"] for one in report["models"]] == sorted(_MODELS)
    served = [one["model"] for one in report["models"] if "error" not in one]
    assert served == ["gaps [red] ü", "good", "noisy", "other", "typo"]
    assert _model(report, "other") == {"model": "other", "skipped": "python"}
    assert report["environment"] == list(preflight.machine_problems())


def _model(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in report["models"] if one["model"] == name)


@pytest.mark.parametrize("name", ["good", "noisy"])
def test_check_of_a_good_model(report: dict[str, Any], name: str) -> None:
    """A model that serves is described, whatever it prints, closes or forks on the way."""
    found = _model(report, name)
    assert found["version"] == "1"
    assert found["artifact"] == "model.py: Python source and weights"
    assert found["inputs"] == ["x FP32 [4] → x"]
    assert found["outputs"] == ["y FP32 [4]"]
    assert found["max_batch_size"] == 8
    assert found["options"] == {}
    assert found["notes"] == found["warnings"] == []


def test_check_completes(report: dict[str, Any]) -> None:
    """What a config leaves out is told by the model, and noted."""
    found = _model(report, "gaps [red] ü")
    assert found["inputs"] == ["x FP32 [4] → x"]
    assert found["outputs"] == ["OUTPUT__0 FP32 [4]"]
    assert found["max_batch_size"] == 8
    (note,) = found["notes"]
    assert "leaves out inputs or outputs" in note


def test_check_notes(report: dict[str, Any]) -> None:
    """What a load warns about is a warning; a config that cannot be read has no notes."""
    assert _model(report, "broken_config")["notes"] == []
    (warning,) = _model(report, "typo")["warnings"]
    assert "Did you mean AUTO_COMPLETE_TIMEOUT_S?" in warning


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("misspelt", "Did you mean pytorch_py?"),
        ("no_backend", "config.pbtxt has no `backend`"),
        ("broken_config", "config.pbtxt cannot be read: 2:"),
        ("latin", "config.pbtxt cannot be read"),
        ("broken_source", "model.py fails at line 1: SyntaxError"),
        ("exits", "trying the model ended the process with exit code 7"),
        ("hangs", "trying the model took longer than 1 seconds"),
        ("no_versions", "the model folder has no versions"),
    ],
)
def test_check_of_a_broken_model(report: dict[str, Any], name: str, says: str) -> None:
    """A model that would not load has the sentence that the server would show, in one line."""
    found = _model(report, name)
    assert found["error"].startswith(f"model '{name}': ")
    assert says in found["error"]
    assert "\n" not in found["error"]


@pytest.mark.parametrize("name", ["raises", "raises_in_completion"])
def test_check_names_the_line_of_the_user(report: dict[str, Any], name: str) -> None:
    """The innermost line of the model's own files is named, and no line of a library."""
    found = _model(report, name)
    assert "RuntimeError: mat1 and mat2 shapes" in found["error"]
    source = "return torch.relu(x) @ torch.ones(3, 2)"
    assert found["at"].endswith(f"/{name}/1/helper.py:6 in refuse: {source}")
    assert "traceback" not in found


def test_check_with_traceback(tmp_path: Path) -> None:
    """The whole traceback is printed below the sentence, in words and in JSON."""
    _lay_out(tmp_path, "raises")
    done = _run("check", "--traceback", str(tmp_path))
    assert done.returncode == 1
    sentence, _, text = done.stdout.partition("Traceback (most recent call last):\n")
    assert "helper.py:6 in refuse" in sentence
    assert 'model.py", line 8, in forward\n    return refuse(x)\n' in text
    (found,) = json.loads(_run("check", "--traceback", "--json", str(tmp_path)).stdout)["models"]
    assert 'helper.py", line 6, in refuse\n' in found["traceback"]


def test_check_prints_each_model_when_it_is_done(tmp_path: Path) -> None:
    """The first model's line is printed while the second one is still tried."""
    done = tmp_path / "done"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(done)!r}).exists():\n"
    _lay_out(tmp_path, "broken_config", "good")
    path = tmp_path / "good" / "1" / "model.py"
    path.write_text(f"{waits}    time.sleep(0.01)\n{path.read_text()}")
    command = [sys.executable, "-c", _APP, "check", "--timeout=120", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("FAILED  model 'broken_config'")
        done.touch()
        assert process.stdout.readline() == "OK      good 1\n"
        process.stdout.read()


def test_check_for_reading(tmp_path: Path) -> None:
    """Without --json, models are told in words, with their brackets; a failed one exits with 1."""
    _lay_out(tmp_path, "gaps [red] ü", "broken_config")
    done = _run("check", str(tmp_path))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "OK      gaps [red] ü 1" in lines
    assert any(line.split() == ["inputs", "x", "FP32", "[4]", "→", "x"] for line in lines)
    assert any(line.startswith("FAILED  model 'broken_config': ") for line in lines)
    assert "Traceback" not in done.stderr


def test_check_of_one_model(tmp_path: Path) -> None:
    """A model folder may be named itself, also by a relative path; nothing in it changes."""
    _lay_out(tmp_path, "good")
    before = _tree(tmp_path)
    done = _run("check", ".", cwd=tmp_path / "good")
    assert done.stdout.startswith("OK      good 1\n")
    assert done.returncode == int(bool(list(preflight.machine_problems())))
    assert _tree(tmp_path) == before


def test_check_in_time(tmp_path: Path) -> None:
    """--timeout bounds also what tells the inputs and outputs; a model's own limit may be less."""
    _lay_out(tmp_path, "hangs")
    (tmp_path / "hangs" / "config.pbtxt").write_text(_BARE)
    done = _run("check", "--json", "--timeout=1", str(tmp_path))
    (hung,) = json.loads(done.stdout)["models"]
    assert "trying the model took longer than 1 seconds" in hung["error"]


def test_check_leaves_less_time_for_the_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was spent on completing a config is not given once more to its model."""
    given: list[float] = []

    def run(_model: str, task: str, _arguments: Any, seconds: float) -> dict[str, Any]:
        given.append(seconds)
        time.sleep(0.2)
        told = {"input": [], "output": [], "max_batch_size": 0, "decoupled": False}
        return told if "schema" in task else {"hooks": False}

    monkeypatch.setattr(child_process, "run", run)
    _lay_out(tmp_path, "gaps [red] ü")
    with pytest.raises(typer.Exit):
        check(tmp_path, as_json=True, timeout=100.0)
    completing, trying = given
    assert completing == 100.0
    assert 0 < trying < completing


def test_check_of_an_empty_folder(tmp_path: Path) -> None:
    """A folder without models is a problem and exit code 1, in words and in JSON."""
    done = _run("check", str(tmp_path))
    assert done.returncode == 1
    assert f"{tmp_path} holds no models" in done.stdout
    done = _run("check", "--json", str(tmp_path))
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["models"] == []
    assert any("holds no models" in problem for problem in document["environment"])


# --- init ------------------------------------------------------------------------------------


def _tree(folder: Path) -> dict[str, bytes | None]:
    """All that lies in a folder, with the contents of its files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


_ODD = "größe 2.0 -x_y"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with artifacts, and a repository that `init` made of them."""
    folder = tmp_path_factory.mktemp("init")
    examples = {"x": torch.rand(2, 4)}
    (folder / "script").mkdir()
    scenarios.script(models.Affine(), "script.pt")(folder / "script")
    scenarios.safe(examples, "example_inputs.safetensors")(folder / "script")
    (folder / "program.pt2").write_bytes(kinds._exported("one"))
    source = models.source(models.Affine) + kinds._EXAMPLE_FUNCTION
    (folder / "classes.py").write_text(source)
    scenarios.safe(scenarios.affine().state_dict(), "classes.safetensors")(folder)
    for arguments in (
        ("script/script.pt", "--repository=new/models"),
        ("classes.py", "--repository", "new/models", "--name=classifier.v1"),
        ("program.pt2", "--repository=new/models", "--link", f"--name={_ODD}"),
    ):
        done = _run("init", *arguments, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert "loads and runs" in done.stdout, done.stdout
    return folder


_MADE = {
    "script": (["model.pt", "example_inputs.safetensors"], "x", 8),
    "classifier.v1": (["model.py", "model.safetensors"], "x", 8),
    _ODD: (["model.pt2"], "x", 64),
}


def test_init_makes_nothing_else(made: Path) -> None:
    """The repository holds the models by their names, and no scratch folder."""
    assert sorted(path.name for path in (made / "new" / "models").iterdir()) == sorted(_MADE)


@pytest.mark.parametrize("name", _MADE, ids=["torchscript", "module", "exported"])
def test_init_makes_a_model_folder(made: Path, name: str) -> None:
    """The files have the names that are served; the config is one that Triton reads, complete."""
    files, x, size = _MADE[name]
    folder = made / "new" / "models" / name
    assert sorted(path.name for path in folder.iterdir()) == ["1", "config.pbtxt"]
    assert sorted(path.name for path in (folder / "1").iterdir()) == sorted(files)
    document = pbtxt.read(folder)
    assert document["backend"] == "pytorch_py"
    assert not completion.is_incomplete(document)
    assert document["max_batch_size"] == size
    assert "dynamic_batching" in document
    (taken,) = document["input"]
    assert (taken["name"], taken["data_type"], taken["dims"]) == (x, "TYPE_FP32", [4])
    assert [one["dims"] for one in document["output"]] == [[3]]


@pytest.mark.parametrize("name", _MADE, ids=["torchscript", "module", "exported"])
def test_init_makes_a_folder_that_others_can_read(made: Path, name: str) -> None:
    """A server of another user can enter it, although it was made in a private folder."""
    plain = (made / "script").stat().st_mode
    assert (made / "new" / "models" / name).stat().st_mode == plain


def test_init_links_or_copies(made: Path) -> None:
    """--link links to the file by an absolute path; without it, files are copies of their own."""
    linked = made / "new" / "models" / _ODD / "1" / "model.pt2"
    assert linked.readlink() == made / "program.pt2"
    copied = made / "new" / "models" / "script" / "1" / "model.pt"
    assert not copied.is_symlink()
    assert copied.read_bytes() == (made / "script" / "script.pt").read_bytes()


def test_init_of_a_package_for_cuda(tmp_path: Path) -> None:
    """The config of a package for CUDA has KIND_GPU; init says that this machine has no GPU."""
    with zipfile.ZipFile(tmp_path / "net.pt2", "w") as archive:
        archive.writestr("net/data/aotinductor/model/net.wrapper.so", "")
        metadata = "net/data/aotinductor/model/net_metadata.json"
        archive.writestr(metadata, '{"AOTI_DEVICE_KEY": "cuda"}')
    done = _run("init", "net.pt2", cwd=tmp_path)
    assert "was built for device cuda (here: cpu). Serve it on such a machine" in done.stdout
    assert done.returncode == 1
    document = pbtxt.read(tmp_path / "net")
    assert [group["kind"] for group in document["instance_group"]] == ["KIND_GPU"]
    assert document["parameters"]["FORCE_CPU_ONLY_INPUT_TENSORS"] == {"string_value": "no"}


def test_init_writes_no_parameter_of_gpus_for_the_cpu(made: Path) -> None:
    """What leaves inputs on the GPU is a comment in the config of a model on the CPU."""
    for name in _MADE:
        folder = made / "new" / "models" / name
        assert pbtxt.read(folder).get("parameters", {}) == {}
        assert "FORCE_CPU_ONLY_INPUT_TENSORS" in (folder / "config.pbtxt").read_text()


def test_check_of_what_init_made(made: Path) -> None:
    """What `init` makes passes `check`, without a note."""
    done = _run("check", "--json", "new/models", cwd=made)
    document = json.loads(done.stdout)
    assert {one["model"] for one in document["models"]} == set(_MADE)
    assert not any("error" in one or one["notes"] for one in document["models"]), done.stdout


@pytest.mark.parametrize("link", [[], ["--link"]], ids=["copied", "linked"])
def test_init_takes_what_the_source_needs(tmp_path: Path, link: list[str]) -> None:
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
    done = _run("init", "net.py", *link, cwd=tmp_path)
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


def _next(done: subprocess.CompletedProcess[str], word: str = "next:") -> list[str]:
    """The words of the command that `init` names."""
    (line,) = [one for one in done.stdout.splitlines() if one.startswith(word)]
    program, *arguments = shlex.split(line.removeprefix(word))
    assert program == "torch-py-backend"
    return arguments


def test_init_without_examples(tmp_path: Path) -> None:
    """Where nothing tells the shapes, the arguments are named, and a command that goes on.

    Whether there is a batch dimension is left open, and told once the inputs are known.
    """
    torch.jit.trace(Classifier().eval(), torch.rand(1, 3, _EDGE, _EDGE)).save(tmp_path / "net.pt")
    done = _run("init", "net.pt", cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "the types and sizes of x are not known" in done.stdout
    text = (tmp_path / "net" / "config.pbtxt").read_text()
    assert '# input [{ name: "x" data_type: TYPE_FP32 dims: [ … ] }]' in text
    assert completion.is_incomplete(pbtxt.read(tmp_path / "net"))
    assert "\nmax_batch_size" not in text

    *command, wish = _next(done)
    assert wish == "x:FP32:3x224x224"
    done = _run(*command[:-1], _IMAGES, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loads and runs" in done.stdout
    assert _next(done) == ["serve", "."]
    document = pbtxt.read(tmp_path / "net")
    assert document["max_batch_size"] == 8
    assert document["input"][0]["dims"] == [3, _EDGE, _EDGE]
    assert document["output"][0]["dims"] == [5]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_init_of_weights(tmp_path: Path, suffix: str) -> None:
    """A state_dict asks for its class; once that lies beside it, the same command goes on."""
    file = f"net.{suffix}"
    if suffix == "pt":
        torch.save(Classifier().state_dict(), tmp_path / file)
    else:
        safetensors.torch.save_file(Classifier().state_dict(), tmp_path / file)
    done = _run("init", file, _IMAGES, cwd=tmp_path)
    assert done.returncode == 1
    assert "Write net.py beside it, with the class that it belongs to" in done.stderr
    scenarios.text(models.source(Classifier), "net.py")(tmp_path)
    done = _run("init", file, _IMAGES, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loads and runs" in done.stdout
    assert (tmp_path / "net" / "1" / f"model.{suffix}").is_file()


def test_init_without_weights(tmp_path: Path) -> None:
    """A class without its weights: exit code 1, what is missing, and the commands that go on."""
    scenarios.text(models.source(Classifier), "net.py")(tmp_path)
    done = _run("init", "net.py", _IMAGES, cwd=tmp_path)
    assert done.returncode == 1
    assert "there is no weights file beside model.py" in done.stdout
    assert "next: save the weights as net.pt" in done.stdout
    # Their shapes do not hang on the weights.
    assert not completion.is_incomplete(pbtxt.read(tmp_path / "net"))
    torch.save(Classifier().state_dict(), tmp_path / "net.pt")
    done = _run("init", "net.py", _IMAGES, cwd=tmp_path)
    assert done.returncode == 1
    assert "or replace it with --force" in done.stderr
    done = _run("init", "net.py", _IMAGES, "--force", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert sorted(one.name for one in tmp_path.iterdir()) == ["net", "net.pt", "net.py"]


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
    ("source", "wishes", "rows", "outputs"),
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
    tmp_path: Path, source: str, wishes: list[str], rows: int, outputs: dict[str, list[int]]
) -> None:
    """--input says what is sent; what comes back, and whether rows are batched, is tried."""
    scenarios.text(source, "net.py")(tmp_path)
    done = _run("init", "net.py", *(f"--input={one}" for one in wishes), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    document = pbtxt.read(tmp_path / "net")
    assert document["max_batch_size"] == rows
    assert [one["name"] for one in document["input"]] == [one.split(":")[0] for one in wishes]
    assert {one["name"]: one["dims"] for one in document["output"]} == outputs


def test_init_with_an_example(tmp_path: Path) -> None:
    """--example goes into the model folder, and tells the rest."""
    scenarios.script(Classifier(), "net.pt")(tmp_path)
    scenarios.safe({"x": torch.rand(2, 3, _EDGE, _EDGE)}, "some.safetensors")(tmp_path)
    done = _run("init", "net.pt", "--example=some.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert pbtxt.read(tmp_path / "net")["max_batch_size"] == 8
    assert (tmp_path / "net" / "1" / "example_inputs.safetensors").is_file()


def test_init_of_a_pretrained_folder(tmp_path: Path) -> None:
    """What save_pretrained wrote becomes a model folder that loads and runs."""
    transformers = pytest.importorskip("transformers")
    settings = transformers.BertConfig(
        vocab_size=100,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(settings)
    model.save_pretrained(tmp_path / "bert")
    done = _run("init", "bert", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert _next(done) == ["serve", "models"]
    document = pbtxt.read(tmp_path / "models" / "bert")
    factory = document["parameters"]["MODEL_FACTORY"]["string_value"]
    assert factory == "transformers:BertForSequenceClassification"
    assert [(one["name"], one["dims"], one["optional"]) for one in document["input"]] == [
        ("input_ids", [-1], False),
        ("attention_mask", [-1], True),
        ("token_type_ids", [-1], True),
    ]
    assert [(one["name"], one["dims"]) for one in document["output"]] == [("logits", [3])]


@pytest.mark.parametrize("architectures", [["os.system"], ["a b"], [7], 7, [[]]])
def test_init_of_a_folder_that_names_no_class(tmp_path: Path, architectures: Any) -> None:
    """A config.json from elsewhere names a class of transformers, and nothing behind one."""
    folder = tmp_path / "net"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": architectures}))
    done = _run("init", "net", cwd=tmp_path)
    assert done.returncode == 1
    assert "net is a folder without a config.json of transformers" in done.stderr
    assert not (tmp_path / "models").exists()


def test_init_of_a_pretrained_generator(tmp_path: Path) -> None:
    """A decoder's cache of keys and values is left out of what it returns."""
    transformers = pytest.importorskip("transformers")
    settings = transformers.GPT2Config(
        vocab_size=100, n_embd=16, n_layer=1, n_head=2, n_positions=32, pad_token_id=0
    )
    transformers.GPT2LMHeadModel(settings).save_pretrained(tmp_path / "gpt2-v1.0")
    done = _run("init", "gpt2-v1.0", "--input=input_ids:INT64:-1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    document = pbtxt.read(tmp_path / "models" / "gpt2-v1.0")
    assert [(one["name"], one["dims"]) for one in document["output"]] == [("logits", [-1, 100])]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--input=x"], "--input is 'x'; expected NAME:TYPE:DIMS such as x:FP32:3x224x224"),
        (["--input=x:FLOAT:3"], "with one of the types BOOL"),
        (["--input=x:FP32:3,224"], "expected NAME:TYPE:DIMS"),
        (["--input=x:FP32:-2"], "expected NAME:TYPE:DIMS"),
        (["--input=x:FP32:3", "--example=net.py"], "give one of them"),
        (["--example=none"], "--example is none; expected a file of safetensors"),
    ],
)
def test_init_refuses(tmp_path: Path, arguments: list[str], says: str) -> None:
    """What --input and --example cannot mean is one line, and nothing is made."""
    scenarios.text("def forward(x):\n    return x\n", "net.py")(tmp_path)
    done = _run("init", "net.py", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["net.py"]


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
    """--force replaces a model folder as `init` makes them, and nothing besides."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("def forward(x):\n    return x\n")
    before = _tree(tmp_path)
    done = _run(
        "init", str(tmp_path / files[-1]), "--name=net", "--force", *arguments, cwd=tmp_path
    )
    assert done.returncode == 1
    assert says in done.stderr
    assert _tree(tmp_path) == before


def _pickled(path: Path) -> None:
    torch.save(models.Negate(), path)


def _truncated(path: Path) -> None:
    scenarios.script(models.Affine(), path.name)(path.parent)
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("name", "write", "says"),
    [
        pytest.param(
            "page.pt",
            lambda path: path.write_bytes(b"<!DOCTYPE html><html>not found</html>"),
            ("page.pt is an HTML page", "Download it again"),
            id="html",
        ),
        pytest.param(
            "weights.pt",
            lambda path: torch.save(models.Affine().state_dict(), path),
            ("weights.pt is a state_dict", "Write weights.py beside it"),
            id="state-dict",
        ),
        pytest.param(
            "weights.safetensors",
            lambda path: safetensors.torch.save_file(models.Affine().state_dict(), path),
            ("weights.safetensors is safetensors: weights without code",),
            id="safetensors",
        ),
        pytest.param(
            "module.pt", _pickled, ("a pickle of a whole module", "not loaded"), id="pickle"
        ),
        pytest.param("cut.pt", _truncated, ("truncated or damaged",), id="truncated"),
        pytest.param("nothing.pt", lambda path: path.write_bytes(b""), ("is empty",), id="empty"),
        pytest.param(
            "net.onnx", lambda path: path.write_bytes(b"\x08\x07pytorch"), ("ONNX",), id="onnx"
        ),
        pytest.param(
            "a [red] b.pt",
            lambda path: path.write_bytes(b"PNG"),
            ("a [red] b.pt is not a file that",),
            id="brackets",
        ),
    ],
)
def test_init_of_a_wrong_file(
    tmp_path: Path, name: str, write: Callable[[Path], Any], says: tuple[str, ...]
) -> None:
    """A file that is no model gets its diagnosis and cure in one line, and nothing is made."""
    write(tmp_path / name)
    before = _tree(tmp_path)
    done = _run("init", name, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert all(part in done.stderr for part in says), done.stderr
    assert _tree(tmp_path) == before


def test_init_leaves_no_repository(tmp_path: Path) -> None:
    """A repository that was not there is not left behind, empty, by a wrong file."""
    (tmp_path / "page.pt").write_bytes(b"<html>")
    assert _run("init", "page.pt", "--repository=new/models", cwd=tmp_path).returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["page.pt"]


@pytest.mark.parametrize(
    "name",
    [
        *("../evil", "a/b", "/tmp/evil", "..", ".", ".hidden", "a/", "a/../b"),
        *("[red]", 'a"b', "a\\b", 'a\nplatform: "x" #', "a\n", " ", "$(x)"),
    ],
)
def test_init_stays_in_the_repository(tmp_path: Path, name: str) -> None:
    """A name that is a path, hidden, or more than a comment can hold is refused at once."""
    (tmp_path / "repository").mkdir()
    scenarios.text("def forward(x):\n    return x\n", "net.py")(tmp_path)
    before = _tree(tmp_path)
    done = _run("init", "../net.py", f"--name={name}", cwd=tmp_path / "repository")
    assert done.returncode == 1
    assert f"--name is '{name}'" in done.stderr
    assert _tree(tmp_path) == before


@pytest.mark.parametrize(
    "occupy",
    [
        pytest.param(lambda path: path.mkdir(), id="empty-folder"),
        pytest.param(lambda path: path.write_text("mine"), id="file"),
        pytest.param(lambda path: path.symlink_to(path.parent), id="link"),
        pytest.param(
            lambda path: path.symlink_to("/no/such/model"),
            id="broken-link",
        ),
    ],
)
def test_init_overwrites_nothing(tmp_path: Path, occupy: Callable[[Path], Any]) -> None:
    """What has the name already is left as it is."""
    scenarios.text("def forward(x:\n", "net.py")(tmp_path)
    occupy(tmp_path / "taken")
    before = sorted(tmp_path.iterdir())
    done = _run("init", "net.py", "--name=taken", cwd=tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path / 'taken'} exists already" in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_init_where_nothing_can_be_written(tmp_path: Path) -> None:
    """A repository that cannot be made is one line."""
    scenarios.text("def forward(x):\n    return x\n", "net.py")(tmp_path)
    done = _run("init", "net.py", "--repository=/dev/null/models", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_init_writes_what_the_model_told(tmp_path: Path) -> None:
    """Tensors may have any name, and one value a row: in the config, they have it, too."""
    source = """
from torch import ones


def forward(inputs: dict):
    return {name + "!": value for name, value in inputs.items()}


def example_inputs():
    return {'quote "x"': ones(2, 4), "back\\\\slash": ones(2, 3), "größe": ones(2)}
"""
    scenarios.text(source, "net.py")(tmp_path)
    done = _run("init", "net.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = pbtxt.read(tmp_path / "net")
    names = ['quote "x"', "back\\slash", "größe"]
    assert [one["name"] for one in document["input"]] == names
    assert [one["name"] for one in document["output"]] == [f"{name}!" for name in names]
    for role in ("input", "output"):
        assert [one["dims"] for one in document[role]] == [[4], [3], [1]]
        assert [one.get("reshape") for one in document[role]] == [None, None, {"shape": []}]


_TRITONS = ["http", "grpc", "metrics"]
_ARGUMENTS = ["--load-model=a", "--log-verbose", "1", "--load-model", "b", "--load-models=c"]


@pytest.mark.parametrize(
    ("arguments", "values", "rest"),
    [
        ([], [], []),
        (_ARGUMENTS, ["a", "b"], ["--log-verbose", "1", "--load-models=c"]),
        (["--load-model"], [""], []),
        (["--load-model", "--load-model", "x"], ["--load-model", "x"], ["x"]),
    ],
)
def test_arguments_for_tritonserver(
    arguments: list[str], values: list[str], rest: list[str]
) -> None:
    """What serve takes over from tritonserver is found in both spellings, and taken out."""
    assert server_arguments.values(arguments, "load-model") == values
    assert server_arguments.without(arguments, "load-model") == rest


@pytest.mark.parametrize(
    ("arguments", "services"),
    [
        ([], []),
        (["--http-thread-count=2", "--allow-gpu-metrics=false"], []),
        (["--http-port", "80", "--allow-metrics=0", "--reuse-grpc-port=1"], _TRITONS),
    ],
)
def test_services_that_are_configured_for_tritonserver(
    arguments: list[str], services: list[str]
) -> None:
    """A port that tritonserver's own arguments are about is left to tritonserver."""
    found = [one for one in serve._SERVICES if serve._configures(arguments, one)]
    assert found == services


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (Event(EventKind.READY, "m 1"), "[green]READY[/]   m 1"),
        (Event(EventKind.GIVEN_UP, "m", "died"), "[bold red]GIVEN UP[/] m: died"),
        (
            Event(EventKind.FAILED, "m 1", "no [/] in it\n\nAt:\n  /srv/x.py(3): f\n"),
            r"[red]FAILED[/]  m 1: no \[/] in it",
        ),
    ],
)
def test_lines_of_serve(event: Event, line: str) -> None:
    """One line an event; what Triton adds about places in Python stands in its log."""
    assert serve._line(event) == line


@pytest.mark.parametrize(
    ("address", "arguments", "exposed"),
    [
        ("127.0.0.1", [], ""),
        ("0.0.0.0", [], "endpoints model-repository, shared-memory, trace, logging;"),
        (
            "0.0.0.0",
            server_arguments.restriction_arguments("trace,health", "k", "v"),
            "endpoints model-repository, shared-memory, logging;",
        ),
        (
            "0.0.0.0",
            server_arguments.restriction_arguments(",".join(server_arguments.SENSITIVE), "k", "v"),
            "",
        ),
    ],
    ids=["loopback", "all", "some", "none"],
)
def test_endpoints_that_are_open_to_the_network(
    address: str, arguments: list[str], exposed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The note names each endpoint that still asks for no key, and goes when there is none."""
    serve._warn(Console(width=300), address, arguments)
    said = capsys.readouterr().out
    assert bool(said) == bool(exposed)
    assert exposed in said


def test_orphans_in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """As process 1 it takes the exit codes of those whose parents died, and not the server's."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    server = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
    orphan = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
    serve._reap_orphans(server)
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan, 0)
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    serve._reap_orphans(server)
    assert os.waitpid(server, 0) == (server, signal.SIGKILL)
    serve._reap_orphans(server)
