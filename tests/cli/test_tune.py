"""`torch-py-backend tune` as a command: with real measurements, and with simulated ones."""

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
from typer.testing import CliRunner

from torch_py_backend import cli
from torch_py_backend.config import pbtxt, tuned_settings
from torch_py_backend.errors import BackendError

_COMMAND = "from torch_py_backend.cli import app; app()"
# Each candidate is twice as fast as the one before it. After ENDS of them, one never ends.
_SIMULATED = """
import contextlib, itertools, os, time
from torch_py_backend.cli import app
from torch_py_backend.processes import child_process
from torch_py_backend.tools import tuning

numbers = itertools.count()

class Workers:
    alive = True

    def __init__(self, model, task, count):
        self.number = next(numbers)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, messages, seconds):
        if self.number == int(os.environ.get("ENDS", -1)):
            time.sleep(600)
        if "arguments" in messages[0]:
            error = float(os.environ.get("ERROR", 0))
            memory = {"memory_mb": 1, "private_mb": 1, "device_memory_mb": 0, "device_free_mb": 0}
            return [{"error": error, "load_s": 1, **memory}] * len(messages)
        speed = 2.0**self.number
        return [{"latency_ms": 1 / speed, "throughput": speed}] * len(messages)

def run(model, task, arguments, seconds, quiet):
    return {"kind": "TORCHSCRIPT", "inputs": "made-up values", "batch": 2}

child_process.run, tuning.Workers = run, Workers
app()
"""
_ENVIRONMENT = os.environ | {"COLUMNS": "200", "TERM": "dumb"}
_CONFIG = """# mine
backend: "pytorch_py"
max_batch_size: 2
input [{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }]
"""
_SETTING = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'
_AUTOMATIC = _CONFIG + _SETTING.format("OPTIMIZE", "auto")
_BEST_SO_FAR = "stopped before everything was measured; the choice is the best so far"


def _model(folder: Path, text: str = _CONFIG) -> Path:
    """TorchScript: the kind with the fewest runtimes, and without a compilation."""
    (folder / "negate" / "1").mkdir(parents=True)
    torch.jit.save(torch.jit.script(models.Negate()), folder / "negate" / "1" / "model.pt")
    (folder / "negate" / "config.pbtxt").write_text(text)
    return folder / "negate"


def _tune(
    *arguments: Any, code: str = _SIMULATED, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, "tune", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=_ENVIRONMENT | variables,
    )


def _tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def _choice(model: Path) -> dict[str, str] | None:
    """The choice in tuned.json for this machine."""
    return tuned_settings.read_choice(
        model, tuned_settings.fingerprint(tuned_settings.machine_facts())
    )


@pytest.mark.slow
def test_measured(tmp_path: Path) -> None:
    """A table, the results and a plot; the choice in config.pbtxt, whose rest stays as it was."""
    model = _model(tmp_path)
    limits = ("--quick", "--threads=1", "--instances=1")
    done = _tune(model, *limits, "--json", tmp_path / "run.json", code=_COMMAND)
    assert done.returncode == 0, done.stderr
    assert "TorchScript" in done.stdout
    assert "inputs: made-up values; batches of 2; tolerance 0.0001; chosen for both" in done.stdout
    assert "rows/s (1.00)  untuned" in done.stderr
    results = json.loads((tmp_path / "run.json").read_text())
    chosen = results["chosen"]
    (row,) = (row for row in results["rows"] if row["latency_ms"] == chosen["latency_ms"])
    assert row["candidate"]["parameters"] == chosen["parameters"]
    assert f"chosen: {row['candidate']['title']}" in done.stdout
    for figure in ("latency_gain", "throughput", "throughput_gain"):
        assert row[figure] == chosen[figure] > 0
    assert (model / "config.pbtxt").read_text().startswith(_CONFIG)
    written = pbtxt.read(model).get("parameters", {})
    parameters = {key: entry["string_value"] for key, entry in written.items()}
    assert parameters == chosen["parameters"] == _choice(model)
    (entry,) = json.loads((model / "tuned.json").read_text())["machines"].values()
    assert entry == results
    assert (model / "tuned.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("goal", ["latency", "throughput", "both"])
def test_goal(tmp_path: Path, goal: str) -> None:
    """The option says what is chosen by, and the result repeats it."""
    done = _tune(_model(tmp_path), "--quick", f"--for={goal}", "--json", tmp_path / "run.json")
    assert done.returncode == 0, done.stderr
    assert f"chosen for {goal}" in done.stdout
    assert json.loads((tmp_path / "run.json").read_text())["conditions"]["for"] == goal


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    """A signal ends the children; what was measured is printed and saved, and the best is kept."""
    model = _model(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, "tune", str(model), "--rounds=9"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_ENVIRONMENT,
    )
    assert process.stderr is not None
    while "untuned" not in process.stderr.readline():
        assert process.poll() is None
    children = living.descendants(process.pid)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "rows/s" in stdout
    assert _BEST_SO_FAR in stdout
    assert (model / "config.pbtxt").read_text() == _CONFIG
    (entry,) = json.loads((model / "tuned.json").read_text())["machines"].values()
    assert (entry["chosen"]["parameters"], entry["chosen"]["instances"]) == ({}, 1)
    assert len(entry["rows"]) == 1
    # What they have started is killed with them, and takes a moment to be gone.
    assert living.all_end(children)


def test_deadline(tmp_path: Path) -> None:
    """At the deadline, the best so far is written; tuned.json keeps the choice of a whole run."""
    model = _model(tmp_path)
    whole = {"parameters": {"NUM_THREADS": "7"}, "instances": 1}
    machine = tuned_settings.machine_facts()
    tuned_settings.save(model, {"machine": machine, "chosen": whole})
    done = _tune(model, "--deadline=5", ENDS="2")
    assert done.returncode == 0, done.stderr
    assert _BEST_SO_FAR in done.stdout
    assert "keeps its earlier choice" in done.stdout
    assert pbtxt.read(model)["parameters"].keys() == {"OPTIMIZE", "NUM_THREADS"}
    assert _choice(model) == {"NUM_THREADS": "7"}


def test_stopped_before_the_first_measurement(tmp_path: Path) -> None:
    """Without a measurement there is no choice, and nothing is written."""
    model = _model(tmp_path)
    before = _tree(model)
    done = _tune(model, "--deadline=1", ENDS="0")
    assert done.returncode == 130
    assert "stopped before everything was measured; config.pbtxt is as it was" in done.stdout
    assert _tree(model) == before


@pytest.mark.parametrize("arguments", [["--dry-run"], []], ids=["dry-run", "write"])
def test_automatic(tmp_path: Path, arguments: list[str]) -> None:
    """OPTIMIZE "auto" reads tuned.json at load, so config.pbtxt stays; --dry-run writes neither."""
    model = _model(tmp_path, _AUTOMATIC)
    before = _tree(model)
    done = _tune(model, "--quick", *arguments)
    assert done.returncode == 0, done.stderr
    takes = "would take" if arguments else "takes"
    assert f'OPTIMIZE "auto" {takes} it from tuned.json' in done.stdout
    assert (model / "config.pbtxt").read_text() == _AUTOMATIC
    assert (_tree(model) == before) == (_choice(model) is None) == bool(arguments)


def test_dry_run_on_a_terminal(tmp_path: Path) -> None:
    """--dry-run writes nothing. The terminal shows what is measured, and what was found."""
    model = _model(tmp_path)
    before = _tree(model)
    ours, theirs = os.openpty()
    # A terminal holds only some kilobytes for its reader: a thread keeps reading.
    shown: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(ours, shown))
    reader.start()
    done = subprocess.run(
        [sys.executable, "-c", _SIMULATED, "tune", str(model), "--quick", "--dry-run"],
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
    assert "best so far" in text
    assert "None" not in text
    assert b"chosen" in done.stdout
    assert b"+parameters" in done.stdout
    assert b"wrote" not in done.stdout
    assert _tree(model) == before


def _read_all(terminal: int, shown: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while read := os.read(terminal, 1 << 16):
            shown.append(read)


def test_dry_run_elsewhere(tmp_path: Path) -> None:
    """With --dry-run and --output the model's folder is left alone."""
    model = _model(tmp_path, _CONFIG + _SETTING.format("NUM_THREADS", "1"))
    before = _tree(model)
    output = tmp_path / "new" / "folder"
    done = _tune(model, "--quick", "--dry-run", "--output", output)
    assert done.returncode == 0, done.stderr
    assert _tree(model) == before
    assert sorted(path.name for path in output.iterdir()) == ["tuned.json", "tuned.png"]


def test_no_candidate_is_exact(tmp_path: Path) -> None:
    """A tolerance that nothing meets: the closest is named, and config.pbtxt is as it was."""
    model = _model(tmp_path)
    done = _tune(model, "--quick", "--max-error", "1e-6", ERROR="0.5")
    assert done.returncode == 1
    assert "no candidate of 'negate' is within --max-error 1e-06" in done.stderr
    assert "with 0.5" in done.stderr
    assert "Traceback" not in done.stderr
    assert "inexact" in done.stdout
    assert (model / "config.pbtxt").read_text() == _CONFIG
    assert _choice(model) is None


def _refusal(*arguments: Any) -> str:
    """The error of a command that is refused before anything is measured."""
    result = CliRunner().invoke(cli.commands, ["tune", *map(str, arguments)])
    assert isinstance(result.exception, BackendError)
    return str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--threads=0"], "--threads is '0'; expected counts"),
        (["--threads=1,two"], "--threads is '1,two'"),
        (["--instances=-1"], "--instances is '-1'"),
        (["--max-error=-1"], "--max-error is -1; expected a number"),
        (["--max-error=nan"], "--max-error is nan"),
        (["--inputs=/no/such/file"], "/no/such/file is not a file"),
        (["--output=/dev/null/x"], "cannot write into /dev/null/x"),
        (["--json=/dev/null/x"], "cannot write /dev/null/x: Not a directory"),
    ],
)
def test_refused_options(tmp_path: Path, arguments: list[str], says: str) -> None:
    """Options that contradict each other, and files that cannot be written, are refused."""
    model = _model(tmp_path)
    before = _tree(model)
    assert says in _refusal(model, *arguments)
    assert _tree(model) == before


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        (_CONFIG + "instance_group [{ count: 1 }, { count: 2 }]", (), "2 instance groups"),
        ("max_batch_size: many", (), "cannot be read"),
        (_AUTOMATIC, ("--output=elsewhere",), 'OPTIMIZE "auto", which reads tuned.json in the'),
        (_CONFIG + "model_transaction_policy { decoupled: true }", (), "is decoupled"),
    ],
    ids=["groups", "broken", "auto-elsewhere", "decoupled"],
)
def test_refused_configs(tmp_path: Path, text: str, arguments: tuple[str, ...], says: str) -> None:
    """A config that could not be written in the end is refused at the start."""
    assert says in _refusal(_model(tmp_path, text), *arguments)


def test_refused_folders(tmp_path: Path) -> None:
    """A file is no model, nor is a repository, whose models are named."""
    model = _model(tmp_path)
    assert "/dev/null is not a folder" in _refusal("/dev/null")
    assert f"{tmp_path} is a repository; name one of {model}." in _refusal(tmp_path)


def test_damaged_results(tmp_path: Path) -> None:
    """A tuned.json that could not be added to is refused before anything is measured."""
    model = _model(tmp_path)
    (model / "tuned.json").write_text("{")
    assert "tuned.json cannot be read" in _refusal(model, "--quick")
    assert (model / "tuned.json").read_text() == "{"
