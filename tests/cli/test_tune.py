"""`torch-py-backend tune` as a command, on a model that costs nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import living
import models
import pytest
import torch

from torch_py_backend.config import pbtxt, tuned_settings

_COMMAND = (sys.executable, "-c", "from torch_py_backend.cli import app; app()", "tune")
_ENVIRONMENT = os.environ | {"COLUMNS": "200", "TERM": "dumb"}
_CONFIG = """# mine
backend: "pytorch_py"
max_batch_size: 2
input [{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }]
"""
_SETTING = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'


class _Random(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def _model(folder: Path, module: torch.nn.Module | None = None, text: str = _CONFIG) -> Path:
    """TorchScript: the kind with the fewest runtimes, and without a compilation."""
    (folder / "negate" / "1").mkdir(parents=True)
    scripted = torch.jit.script(module or models.Negate())
    torch.jit.save(scripted, folder / "negate" / "1" / "model.pt")
    (folder / "negate" / "config.pbtxt").write_text(text)
    return folder / "negate"


def _tune(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=_ENVIRONMENT,
    )


@pytest.mark.slow
def test_tuned(tmp_path: Path) -> None:
    """A table, the findings and a plot; the choice in config.pbtxt, which stays as it was."""
    model = _model(tmp_path)
    done = _tune(model, "--quick", "--json", tmp_path / "run.json")
    assert done.returncode == 0, done.stderr
    assert "TorchScript" in done.stdout
    assert "chosen" in done.stdout
    assert "inputs: made-up values; tolerance 0.0001; by throughput" in done.stdout
    assert "1/" in done.stderr
    text = (model / "config.pbtxt").read_text()
    assert text.startswith(_CONFIG)
    found = json.loads((tmp_path / "run.json").read_text())
    given = {key: one["string_value"] for key, one in pbtxt.read(model)["parameters"].items()}
    assert given == found["chosen"]["parameters"]
    here = tuned_settings.fingerprint(tuned_settings.machine_facts())
    assert json.loads((model / "tuned.json").read_text())["machines"] == {here: found}
    assert tuned_settings.read_choice(model, here) == given
    assert (model / "tuned.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_automatic_dry_run(tmp_path: Path) -> None:
    """--dry-run writes no tuned.json either, which OPTIMIZE "auto" would read."""
    model = _model(tmp_path, text=_CONFIG + _SETTING.format("OPTIMIZE", "auto"))
    before = _tree(model)
    done = _tune(model, "--quick", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert 'OPTIMIZE "auto" would take it from tuned.json' in done.stdout
    assert "wrote" not in done.stdout
    assert _tree(model) == before


@pytest.mark.slow
def test_dry_run_on_a_terminal(tmp_path: Path) -> None:
    """--dry-run writes nothing. The bar shows no number before the candidates are counted."""
    model = _model(tmp_path)
    before = _tree(model)
    ours, theirs = os.openpty()
    # A terminal holds only some kilobytes for its reader: a thread keeps reading.
    shown: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(ours, shown))
    reader.start()
    done = subprocess.run(
        [*_COMMAND, str(model), "--quick", "--dry-run"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=False,
        env=_ENVIRONMENT | {"TERM": "xterm"},
    )
    os.close(theirs)
    reader.join()
    os.close(ours)
    text = b"".join(shown).decode()
    assert done.returncode == 0, text
    assert "the reference, in eager" in text
    assert "1/3" in text
    assert "None" not in text
    assert b"chosen" in done.stdout
    assert b"wrote" not in done.stdout
    assert _tree(model) == before


def _read_all(terminal: int, shown: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while read := os.read(terminal, 1 << 16):
            shown.append(read)


def _tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_dry_run_elsewhere(tmp_path: Path) -> None:
    """With --dry-run and --output the model's folder is left alone; the change is shown."""
    text = _CONFIG + _SETTING.format("NUM_THREADS", "1") + _SETTING.format("BATCH_BUCKETS", "2")
    model = _model(tmp_path, text=text)
    output = tmp_path / "new" / "folder"
    done = _tune(model, "--quick", "--dry-run", "--output", output)
    assert done.returncode == 0, done.stderr
    assert (model / "config.pbtxt").read_text() == text
    assert sorted(path.name for path in model.iterdir()) == ["1", "config.pbtxt"]
    assert sorted(path.name for path in output.iterdir()) == ["tuned.json", "tuned.png"]


@pytest.mark.slow
def test_automatic(tmp_path: Path) -> None:
    """OPTIMIZE "auto" reads tuned.json at load, so config.pbtxt stays."""
    text = _CONFIG + _SETTING.format("OPTIMIZE", "auto")
    model = _model(tmp_path, text=text)
    done = _tune(model, "--quick")
    assert done.returncode == 0, done.stderr
    assert 'OPTIMIZE "auto" takes it from tuned.json' in done.stdout
    assert (model / "config.pbtxt").read_text() == text
    assert (
        tuned_settings.read_choice(
            model, tuned_settings.fingerprint(tuned_settings.machine_facts())
        )
        is not None
    )


@pytest.mark.slow
def test_no_candidate_is_exact(tmp_path: Path) -> None:
    """A tolerance that nothing meets: the closest is named, and config.pbtxt is as it was."""
    model = _model(tmp_path, _Random())
    done = _tune(model, "--quick", "--max-error", "1e-6")
    assert done.returncode == 1
    assert "no candidate of 'negate' is within --max-error 1e-06" in done.stderr
    assert "Traceback" not in done.stderr
    assert "inexact" in done.stdout
    assert (model / "config.pbtxt").read_text() == _CONFIG
    assert (
        tuned_settings.read_choice(
            model, tuned_settings.fingerprint(tuned_settings.machine_facts())
        )
        is None
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C ends the children, prints and saves what was measured, and leaves config.pbtxt."""
    model = _model(tmp_path)
    process = subprocess.Popen(
        [*_COMMAND, str(model), "--rounds=9"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_ENVIRONMENT,
    )
    assert process.stderr is not None
    while not process.stderr.readline().startswith("2/"):
        assert process.poll() is None
    children = living.descendants(process.pid)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "rows/s" in stdout
    assert "stopped before everything was measured; the choice is the best so far" in stdout
    assert (model / "config.pbtxt").read_text() == _CONFIG
    (entry,) = json.loads((model / "tuned.json").read_text())["machines"].values()
    assert entry["chosen"] == {"parameters": {}, "instances": 1}
    assert len(entry["rows"]) == 1
    # What they have started is killed with them, and takes a moment to be gone.
    assert living.all_end(children)


# The first two candidates are measured at once, the third takes longer than the test.
_SIMULATED = """
import time
from torch_py_backend.cli import app
from torch_py_backend.processes import child_process

speeds = iter([10.0, 20.0])

def run_together(model, task, arguments, seconds):
    if task.endswith(":prepare"):
        return [{"kind": "TORCHSCRIPT", "inputs": "made-up values"}]
    speed = next(speeds, None)
    if speed is None:
        time.sleep(600)
    measured = {"p99_ms": 1, "memory_mb": 1, "device_memory_mb": 0, "error": 0, "load_s": 1}
    return [{"latency_ms": 1 / speed, "throughput": {"1": speed}, **measured} for _ in arguments]

child_process.run_together = run_together
app()
"""


def test_deadline(tmp_path: Path) -> None:
    """At the deadline, the best so far is written; tuned.json keeps the choice of a whole run."""
    model = _model(tmp_path)
    here = tuned_settings.machine_facts()
    whole = {"machine": here, "chosen": {"parameters": {"NUM_THREADS": "7"}, "instances": 1}}
    tuned_settings.save(model, whole)
    command = [sys.executable, "-c", _SIMULATED, "tune", str(model), "--deadline=3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "stopped before everything was measured; the choice is the best so far" in done.stdout
    assert "keeps its earlier choice" in done.stdout
    assert pbtxt.read(model)["parameters"].keys() == {"NUM_THREADS"}
    assert tuned_settings.read_choice(model, tuned_settings.fingerprint(here)) == {
        "NUM_THREADS": "7"
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["--threads=0"], "--threads is '0'; expected counts", id="no-threads"),
        pytest.param(["--threads=1,two"], "--threads is '1,two'", id="words"),
        pytest.param(["--instances=-1"], "--instances is '-1'", id="negative"),
        pytest.param(["--quick", "--threads=1"], "leave out one of them", id="quick-and-threads"),
        pytest.param(["--quick", "--instances=1"], "leave out one", id="quick-and-instances"),
        pytest.param(["--max-error=-1"], "--max-error is -1; expected a number", id="tolerance"),
        pytest.param(["--max-error=nan"], "--max-error is nan", id="nan"),
        pytest.param(["--inputs=/no/such/file"], "/no/such/file is not a file", id="inputs"),
        pytest.param(["--output=/dev/null/x"], "cannot write into /dev/null/x", id="output"),
        pytest.param(["--json=/dev/null/x"], "cannot write /dev/null/x: Not a dir", id="json"),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], says: str) -> None:
    """What contradicts itself or cannot be kept is one line, before anything is measured."""
    model = _model(tmp_path)
    done = _tune(model, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in model.iterdir()) == ["1", "config.pbtxt"]


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        pytest.param(
            _CONFIG + "instance_group [{ count: 1 }, { count: 2 }]",
            (),
            "2 instance groups",
            id="groups",
        ),
        pytest.param("max_batch_size: many", (), "cannot be read", id="broken"),
        pytest.param(
            _CONFIG + _SETTING.format("OPTIMIZE", "auto"),
            ("--output=elsewhere",),
            'OPTIMIZE "auto", which reads tuned.json in the model',
            id="auto-elsewhere",
        ),
    ],
)
def test_configs_refused(tmp_path: Path, text: str, arguments: tuple[str, ...], says: str) -> None:
    """A config that could not be written in the end is refused at the start."""
    done = _tune(_model(tmp_path, text=text), *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert says in done.stderr


@pytest.mark.parametrize("path", ["/no/such/model", "/dev/null"])
def test_no_folder(path: str) -> None:
    """What is no folder is no model."""
    done = _tune(path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"{path} is not a folder" in done.stderr


def test_repository(tmp_path: Path) -> None:
    """A repository is no model: the models in it are named."""
    model = _model(tmp_path)
    done = _tune(tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path} is a repository; name one of {model}." in done.stderr
    assert done.stderr.count("\n") == 1


def test_damaged_findings(tmp_path: Path) -> None:
    """A tuned.json that could not be added to is refused before anything is measured."""
    model = _model(tmp_path)
    (model / "tuned.json").write_text("{")
    done = _tune(model, "--quick")
    assert done.returncode == 1
    assert "tuned.json cannot be read" in done.stderr
    assert (model / "tuned.json").read_text() == "{"
