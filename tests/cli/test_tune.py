"""`torch-py-backend tune` as a command: with real measurements, and with simulated ones."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import command_line
import living
import models
import pytest
import torch
from rich.console import Console
from typing_extensions import Self

from torch_py_backend.cli.interruption import SIGNALS
from torch_py_backend.config import pbtxt, tuned_settings
from torch_py_backend.errors import LoadError
from torch_py_backend.processes import child_process
from torch_py_backend.tools import tuning

_COMMAND = "from torch_py_backend.cli import app; app()"
_ENVIRONMENT = os.environ | {"COLUMNS": "200", "TERM": "dumb"}
_CONFIG = """# mine
backend: "pytorch_py"
max_batch_size: 2
input [{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }]
"""
_SETTING = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'
_AUTOMATIC = _CONFIG + _SETTING.format("OPTIMIZE", "auto")
_Command: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
_BEST_SO_FAR = "stopped before everything was measured; the choice is the best so far"


def _model(folder: Path, text: str = _CONFIG) -> Path:
    """TorchScript: the kind with the fewest runtimes, and without a compilation."""
    (folder / "negate" / "1").mkdir(parents=True)
    torch.jit.save(torch.jit.script(models.Negate()), folder / "negate" / "1" / "model.pt")
    (folder / "negate" / "config.pbtxt").write_text(text)
    return folder / "negate"


class _Workers:
    """Simulated candidates: each is faster than the one before it; one may never end."""

    alive = True
    started = 0
    growth = 2.0
    endless = -1
    error = 0.0

    def __init__(self, *_: object) -> None:
        self._number = _Workers.started
        _Workers.started += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, messages: list[dict[str, Any]], _seconds: float) -> list[dict[str, float]]:
        if self._number == self.endless:
            time.sleep(600)
        if "arguments" in messages[0]:
            memory = {"memory_mb": 1, "private_mb": 1, "device_memory_mb": 0, "device_free_mb": 0}
            return [{"error": self.error, "load_s": 1, **memory}] * len(messages)
        speed = self.growth**self._number
        return [{"latency_ms": 1 / speed, "throughput": speed, "p99_ms": 10.0}] * len(messages)


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Command]:
    """The command with simulated measurements; signals, which it leaves ignored, are restored."""
    prepared = {"kind": "TORCHSCRIPT", "inputs": "made-up values", "batch": 2}
    monkeypatch.setattr(child_process, "run", lambda *_, **__: prepared)
    monkeypatch.setattr(tuning, "Workers", _Workers)
    for name in ("started", "growth", "endless", "error"):
        monkeypatch.setattr(_Workers, name, getattr(_Workers, name))
    handlers = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)}
    yield lambda *arguments: command_line.run("tune", *map(str, arguments))
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _choice(model: Path) -> dict[str, str] | None:
    """The choice in tuned.json for this machine."""
    return tuned_settings.read_choice(
        model, tuned_settings.fingerprint(tuned_settings.machine_facts())
    )


@pytest.mark.slow
def test_measured(tmp_path: Path) -> None:
    """A table and the results; the choice in config.pbtxt, whose rest stays as it was."""
    model = _model(tmp_path)
    limits = ("--quick", "--threads=1", "--instances=1")
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, "tune", model, *limits, "--json", tmp_path / "run.json"],
        capture_output=True,
        text=True,
        check=False,
        env=_ENVIRONMENT,
    )
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


@pytest.mark.slow
def test_interrupted(tmp_path: Path) -> None:
    """A signal ends the children; what was measured is printed and saved, and the best is kept."""
    model = _model(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, "tune", str(model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_ENVIRONMENT,
    )
    assert process.stderr is not None
    while "untuned" not in process.stderr.readline():
        assert process.poll() is None
    children = living.descendants(process.pid)
    process.send_signal(signal.SIGTERM)
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


# --- the results of simulated measurements ---------------------------------------------------


def test_goal(tune: _Command, tmp_path: Path) -> None:
    """The option says what is chosen by, and the result repeats it."""
    model = _model(tmp_path)
    done = tune(model, "--quick", "--for=latency", "--json", tmp_path / "run.json")
    assert done.returncode == 0, done.stderr
    assert "chosen for latency" in done.stdout
    assert json.loads((tmp_path / "run.json").read_text())["conditions"]["for"] == "latency"
    assert f"written into {model / 'config.pbtxt'}" in done.stdout


def test_nothing_is_better(tune: _Command, tmp_path: Path) -> None:
    """If the untuned settings stay, config.pbtxt does, too."""
    model = _model(tmp_path)
    _Workers.growth = 1.0
    done = tune(model, "--quick", "--for=latency")
    assert "config.pbtxt has these settings already" in done.stdout
    assert (model / "config.pbtxt").read_text() == _CONFIG


def test_deadline(tune: _Command, tmp_path: Path) -> None:
    """At the deadline, the best so far is written; tuned.json keeps the choice of a whole run."""
    model = _model(tmp_path)
    whole = {"parameters": {"NUM_THREADS": "7"}, "instances": 1}
    machine = tuned_settings.machine_facts()
    tuned_settings.save(model, {"machine": machine, "chosen": whole})
    _Workers.endless = 2
    done = tune(model, "--deadline=3")
    assert done.returncode == 0, done.stderr
    assert _BEST_SO_FAR in done.stdout
    assert "keeps its earlier choice" in done.stdout
    assert pbtxt.read(model)["parameters"].keys() == {"OPTIMIZE", "NUM_THREADS"}
    assert _choice(model) == {"NUM_THREADS": "7"}


def test_stopped_before_the_first_measurement(tune: _Command, tmp_path: Path) -> None:
    """Without a measurement there is no choice, and nothing is written."""
    model = _model(tmp_path)
    before = command_line.tree(model)
    _Workers.endless = 0
    done = tune(model, "--deadline=1")
    assert done.returncode == 130
    assert "stopped before everything was measured; config.pbtxt is as it was" in done.stdout
    assert command_line.tree(model) == before


@pytest.mark.parametrize("arguments", [["--dry-run"], []], ids=["dry-run", "write"])
def test_automatic(tune: _Command, tmp_path: Path, arguments: list[str]) -> None:
    """OPTIMIZE "auto" reads tuned.json at load, so config.pbtxt stays; --dry-run writes neither."""
    model = _model(tmp_path, _AUTOMATIC)
    before = command_line.tree(model)
    done = tune(model, "--quick", *arguments)
    assert done.returncode == 0, done.stderr
    takes = "would take" if arguments else "takes"
    assert f'OPTIMIZE "auto" {takes} it from tuned.json' in done.stdout
    assert (model / "config.pbtxt").read_text() == _AUTOMATIC
    assert (command_line.tree(model) == before) == (_choice(model) is None) == bool(arguments)


def test_dry_run_on_a_terminal(
    tune: _Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--dry-run writes --output only. The terminal shows what is measured, and what was found."""
    model = _model(tmp_path, _CONFIG + _SETTING.format("NUM_THREADS", "1"))
    before = command_line.tree(model)
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=100)
    monkeypatch.setattr(sys.modules["torch_py_backend.cli.tune"], "_ERR", terminal)
    done = tune(model, "--quick", "--dry-run")
    assert done.returncode == 0, shown.getvalue()
    assert "the reference, in eager" in shown.getvalue()
    assert "best so far" in shown.getvalue()
    assert "None" not in shown.getvalue()
    assert "chosen" in done.stdout
    assert "+parameters" in done.stdout
    assert "wrote" not in done.stdout
    assert command_line.tree(model) == before
    output = tmp_path / "new" / "folder"
    assert tune(model, "--quick", "--dry-run", "--output", output).returncode == 0
    assert command_line.tree(model) == before
    assert [path.name for path in output.iterdir()] == ["tuned.json"]


def test_limit_of_p99(tune: _Command, tmp_path: Path) -> None:
    """What is slower is not chosen; the batch sizes of the choice are a table."""
    model = _model(tmp_path)
    done = tune(model, "--quick", "--max-p99", "20")
    assert done.returncode == 0
    assert "within 20 ms: the most rows/s with batches of 1; max_batch_size is 2" in done.stdout
    done = tune(model, "--quick", "--max-p99", "5")
    assert done.returncode == 1
    assert "no candidate of 'negate' is within --max-p99 5; the fastest is" in done.stderr


def test_no_candidate_is_exact(tune: _Command, tmp_path: Path) -> None:
    """A tolerance that nothing meets: the closest is named, and config.pbtxt is as it was."""
    model = _model(tmp_path)
    _Workers.error = 0.5
    done = tune(model, "--quick", "--max-error", "1e-6")
    assert done.returncode == 1
    assert "no candidate of 'negate' is within --max-error 1e-06" in done.stderr
    assert "with 0.5" in done.stderr
    assert "inexact" in done.stdout
    assert (model / "config.pbtxt").read_text() == _CONFIG
    assert _choice(model) is None


def test_every_candidate_fails(
    tune: _Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing can be measured, the error has the first reason."""

    def fail(*_: object) -> None:
        raise LoadError("negate", "it crashed")

    monkeypatch.setattr(_Workers, "ask", fail)
    done = tune(_model(tmp_path), "--quick")
    assert done.returncode == 1
    assert "every candidate failed, the first with: model 'negate': it crashed" in done.stderr


# --- what is refused before anything is measured ---------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--threads=0"], "--threads is '0'; expected counts"),
        (["--instances=1,two"], "--instances is '1,two'"),
        (["--max-error=-1"], "--max-error is -1; expected a number"),
        (["--max-error=nan"], "--max-error is nan"),
        (["--max-p99=0"], "--max-p99 is 0; expected milliseconds above 0"),
        (["--inputs=/no/such/file"], "/no/such/file is not a file"),
        (["--output=/dev/null/x"], "cannot write into /dev/null/x"),
        (["--json=/dev/null/x"], "cannot write /dev/null/x: Not a directory"),
        (["--json=/"], "cannot write /: it is a folder"),
    ],
)
def test_refused_options(tmp_path: Path, arguments: list[str], says: str) -> None:
    """Invalid options, and files that cannot be written, are refused."""
    model = _model(tmp_path)
    before = command_line.tree(model)
    command_line.refuse(says, "tune", str(model), *arguments)
    assert command_line.tree(model) == before


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
    command_line.refuse(says, "tune", str(_model(tmp_path, text)), *arguments)


def test_refused_folders(tmp_path: Path) -> None:
    """Refused are a file, a repository, and a tuned.json that could not be added to."""
    model = _model(tmp_path)
    command_line.refuse("/dev/null is not a folder", "tune", "/dev/null")
    command_line.refuse(f"is a repository; name one of {model}.", "tune", str(tmp_path))
    output = str(model / "config.pbtxt" / "x")
    command_line.refuse(f"cannot write into {output}", "tune", str(model), "--output", output)
    (model / "tuned.json").write_text("{")
    command_line.refuse("tuned.json cannot be read", "tune", str(model), "--quick")
    assert (model / "tuned.json").read_text() == "{"
