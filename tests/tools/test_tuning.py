"""The order of the measurements, their rows after failures, and the choice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

from torch_py_backend.config import pbtxt, threads
from torch_py_backend.errors import LoadError, ToolError
from torch_py_backend.processes import child_process
from torch_py_backend.tools import tuning
from torch_py_backend.tools.candidates import Allowed
from torch_py_backend.tools.ranking import Goal, Limits
from torch_py_backend.tools.tuning import Plan, Tuning

_CONFIG = """
backend: "pytorch_py"
max_batch_size: 2
input [{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }]
parameters { key: "WARMUP" value { string_value: "off" } }
parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "2" } }
"""


def _plan(folder: Path, text: str = _CONFIG, **changes: Any) -> Plan:
    (folder / "digits" / "1").mkdir(parents=True)
    (folder / "digits" / "config.pbtxt").write_text(text)
    plain: dict[str, Any] = {
        "folder": folder / "digits",
        "version": "1",
        "document": pbtxt.read(folder / "digits"),
        "allowed": Allowed(),
        "limits": Limits(1e-4),
        "goal": Goal.THROUGHPUT,
        "inputs": None,
        "timeout_s": 60.0,
    }
    return Plan(**(plain | changes))


_LOAD = {
    "error": 0.0,
    "load_s": 1.0,
    "memory_mb": 3.0,
    "private_mb": 1.0,
    "device_memory_mb": 0.0,
    "device_free_mb": 0.0,
}


class _Children:
    """A substitute of child processes that records what was loaded and measured."""

    def __init__(self) -> None:
        self.kind = "TORCHSCRIPT"
        # Settings and instances of each load, and the name of what each message was sent to.
        self.loads: list[tuple[dict[str, str], int]] = []
        self.measured: list[str] = []
        self.alive: list[str] = []
        self.prepared: Mapping[str, Any] = {}
        self.report = dict(_LOAD)
        self.throughput: dict[str, float] = {}
        # The throughput of a runtime when it is loaded for the first time.
        self.lucky: dict[str, float] = {}
        self.fails: dict[str, BaseException] = {}
        # When this runtime starts, the untuned workers die.
        self.crowds_out = ""
        self.untuned: _Workers | None = None

    def run(self, model: str, task: str, arguments: Any, seconds: float, *, quiet: bool) -> Any:
        assert task.endswith(":prepare")
        self.prepared = arguments
        return {"kind": self.kind, "inputs": "made-up values", "batch": 2}

    def start(self, model: str, task: str, count: int) -> _Workers:
        return _Workers(self)


class _Workers:
    """A candidate, named by its OPTIMIZE, threads and instances."""

    def __init__(self, children: _Children) -> None:
        self._children = children
        self._name = ""
        self._runtime = ""
        self._threads = 0
        self.alive = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._children.alive.remove(self._name)

    def ask(self, messages: Sequence[Mapping[str, Any]], seconds: float) -> list[Any]:
        children = self._children
        if "arguments" in messages[0]:
            document = json.loads(messages[0]["arguments"]["model_config"])
            settings = {key: value["string_value"] for key, value in document["parameters"].items()}
            self._runtime = settings.get("OPTIMIZE", "none")
            self._threads = int(settings["NUM_THREADS"])
            self._name = f"{self._runtime} {self._threads}x{len(messages)}"
            children.loads.append((settings, len(messages)))
            children.alive.append(self._name)
            children.untuned = children.untuned or self
            if self._runtime in children.fails:
                raise children.fails[self._runtime]
            if self._runtime == children.crowds_out:
                children.untuned.alive = False
            return [children.report] * len(messages)
        if not self.alive:
            raise LoadError("net", "trying the model ended with SIGKILL")
        children.measured.append(f"{self._name} {messages[0]['rows']}*{len(messages)}")
        speed = children.throughput.get(self._runtime, 10.0)
        if sum(load.get("OPTIMIZE") == self._runtime for load, _ in children.loads) == 1:
            speed = children.lucky.get(self._runtime, speed)
        speed *= self._threads
        rows = messages[0]["rows"]
        figures = {"latency_ms": 10 / speed, "throughput": speed * rows, "p99_ms": rows * 10.0}
        return [figures] * len(messages)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> _Children:
    children = _Children()
    monkeypatch.setattr(child_process, "run", children.run)
    monkeypatch.setattr(tuning, "Workers", children.start)
    monkeypatch.setattr(threads, "available_cores", lambda: 2)
    return children


def _run(run: Tuning) -> list[str]:
    """Return the candidates in the order in which they were measured."""
    begun: list[str] = []
    ended: list[str] = []
    run.run(lambda begin: begun.append(str(begin)), lambda row: ended.append(str(row.candidate)))
    rows = [str(row.candidate) for row in run.rows]
    assert begun == ended
    assert begun[: len(rows)] == rows
    assert set(begun[len(rows) :]) <= {*rows}  # measured again
    return begun


_IMAGES = _CONFIG.replace("dims: [ 4 ]", "dims: [ 3, 8, 8 ]", 1)
_QUICK = Allowed(quick=True)


def test_limit_of_p99(tmp_path: Path, children: _Children) -> None:
    """Batches are as large as the limit allows; the choice is measured with other sizes, too."""
    children.throughput = {"freeze": 20.0}
    text = _CONFIG.replace("max_batch_size: 2", "max_batch_size: 6")
    run = Tuning(_plan(tmp_path, text, allowed=_QUICK, limits=Limits(1e-4, 25.0)))
    _run(run)
    assert children.prepared["longest_s"] == 0.025
    choice = run.choice()
    assert choice is not None
    assert choice.p99_ms == 20.0
    assert {rows: figures.p99_ms for rows, figures in run.sizes.items()} == {
        1: 10.0,
        2: 20.0,
        4: 40.0,
    }


def test_limit_that_nothing_keeps(tmp_path: Path, children: _Children) -> None:
    run = Tuning(_plan(tmp_path, allowed=_QUICK, limits=Limits(1e-4, 5.0)))
    _run(run)
    assert run.choice() is None
    assert run.sizes == {}


def test_in_turn_with_the_untuned(tmp_path: Path, children: _Children) -> None:
    """A candidate and the untuned configuration are measured A B B A, while both are loaded."""
    _run(Tuning(_plan(tmp_path, allowed=_QUICK)))
    untuned, frozen = (["none 2x1 1*1", "none 2x1 2*1"], ["freeze 2x1 1*1", "freeze 2x1 2*1"])
    assert children.measured[:14] == [*untuned * 3, *untuned, *frozen, *frozen, *untuned]
    assert children.alive == []


def test_without_memory_for_two(tmp_path: Path, children: _Children) -> None:
    """Where memory does not suffice for two, the untuned configuration is measured before."""
    children.report |= {"device_memory_mb": 50.0, "device_free_mb": 20.0}
    run = Tuning(_plan(tmp_path, allowed=_QUICK))
    _run(run)
    assert all(name.startswith("none 2x1") for name in children.measured[:6])
    assert not any(name.startswith("none 2x1") for name in children.measured[6:])
    assert run.rows[1].latency_gain == 1.0


def test_an_untuned_configuration_that_dies(tmp_path: Path, children: _Children) -> None:
    """The candidate meanwhile has failed; later ones are compared with the earlier figures."""
    children.kind = "MODULE"
    children.crowds_out = "freeze"
    run = Tuning(_plan(tmp_path))
    _run(run)
    assert [bool(row.failure) for row in run.rows] == [False] * 3 + [True] + [False] * 4
    assert "SIGKILL" in run.rows[3].failure


def test_order(tmp_path: Path, children: _Children) -> None:
    """Runtimes first, then other counts for the best; then what compiles; at last the choice."""
    children.kind = "MODULE"
    children.throughput = {"freeze": 50.0}
    run = Tuning(_plan(tmp_path))
    assert _run(run) == [
        "eager, 2 threads x 1",
        "eager, 1 thread x 1",
        "eager, 1 thread x 2",
        "compile + freeze, 2 threads x 1",
        "compile, 2 threads x 1",
        "compile, buckets, 2 threads x 1",
        "compile + freeze, 1 thread x 1",
        "compile + freeze, 1 thread x 2",
        "compile + freeze, 2 threads x 1",
    ]
    assert run.screened


def test_choice_is_confirmed(tmp_path: Path, children: _Children) -> None:
    """A candidate that was the best by chance is not chosen; the next one is measured again."""
    children.lucky = {"freeze,channels_last": 100.0}
    children.throughput = {"freeze": 50.0}
    plan = _plan(tmp_path, _IMAGES, allowed=Allowed(threads=(2,), instances=(1,)))
    run = Tuning(plan)
    expected = ["none", "freeze", "freeze,channels_last", "freeze,channels_last", "freeze"]
    _run(run)
    assert [settings.get("OPTIMIZE", "none") for settings, _ in children.loads] == expected
    choice = run.choice()
    assert choice is not None
    assert (choice.candidate.title, len(run.rows)) == ("freeze", 3)


def test_latency_keeps_the_instances(tmp_path: Path, children: _Children) -> None:
    """The latency of one request in flight does not depend on the count of instances."""
    text = _CONFIG + "instance_group [{ count: 3 }]"
    _run(Tuning(_plan(tmp_path, text, goal=Goal.LATENCY)))
    assert {count for _, count in children.loads} == {3}


def test_clearly_behind(tmp_path: Path, children: _Children) -> None:
    """A candidate that is clearly behind is dropped after three rounds; the untuned one is, too."""
    children.throughput = {"freeze": 5.0}
    run = Tuning(_plan(tmp_path, allowed=_QUICK))
    _run(run)
    assert [row.rounds for row in run.rows] == [3, 3, 3, 5]


def test_instances_together(tmp_path: Path, children: _Children) -> None:
    """Throughput and memory of instances add up; latency is that of one of them."""
    run = Tuning(_plan(tmp_path, allowed=Allowed(threads=(1,), instances=(2,))))
    _run(run)
    row = run.rows[-1]
    assert (row.candidate.instances, row.batch, row.throughput) == (2, 2, 40.0)
    assert (row.latency_ms, row.latency_gain, row.throughput_gain) == (1.0, 0.5, 1.0)
    assert row.memory_mb == 2 * 1.0 + (1 + 2) * 2.0  # private, and shared with the untuned one
    assert {"freeze 1x2 1*1", "freeze 1x2 2*2"} <= {*children.measured}


def test_arguments(tmp_path: Path) -> None:
    """A candidate has its own settings and the rest of config.pbtxt, whose own are the current."""
    plan = _plan(tmp_path)
    arguments = plan.arguments({"NUM_THREADS": "7"}, 3, 1)
    document = json.loads(arguments["model_config"])
    assert document["parameters"] == {
        "WARMUP": {"string_value": "off"},
        "NUM_THREADS": {"string_value": "7"},
    }
    assert document["instance_group"][0]["count"] == 3
    assert arguments["model_instance_name"] == "digits_0_1"
    current = plan.current()
    assert (dict(current.parameters), current.instances) == ({"NUM_THREADS": "2"}, 1)


def test_unset_number_of_threads(tmp_path: Path) -> None:
    """A number of threads that is unset for the LibTorch backend is unset for `tune`, too."""
    plan = _plan(tmp_path, _CONFIG.replace('"2"', '"0"'))
    assert plan.current().parameters == {}


def test_compilers_may_not_give_up(tmp_path: Path, children: _Children) -> None:
    """A candidate must compile, and not into the model's cache."""
    _run(Tuning(_plan(tmp_path, allowed=_QUICK)))
    current, *others = (settings for settings, _ in children.loads)
    assert "COMPILE_REQUIRED" not in current
    assert all(settings["COMPILE_REQUIRED"] == "true" for settings in others)
    for settings in (current, *others):
        assert not settings["COMPILE_CACHE_DIR"].startswith(str(tmp_path))


def test_failure_is_a_row(tmp_path: Path, children: _Children) -> None:
    """A candidate that crashes is a row; the others are measured."""
    children.fails = {"freeze": LoadError("digits", "it crashed")}
    run = Tuning(_plan(tmp_path, allowed=_QUICK))
    _run(run)
    assert [row.failure for row in run.rows] == ["", "model 'digits': it crashed.", "", ""]
    assert [row.rounds > 0 for row in run.rows] == [True, False, True, True]
    assert children.alive == []


def test_interrupted(tmp_path: Path, children: _Children) -> None:
    """The candidates that were measured before an interrupt stay in the rows."""
    children.fails = {"freeze": KeyboardInterrupt()}
    run = Tuning(_plan(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        _run(run)
    assert [row.rounds for row in run.rows] == [3]
    assert not run.screened
    assert children.alive == []


def test_nothing_to_try(tmp_path: Path, children: _Children) -> None:
    """Limits that leave nothing to try are refused before the measurements."""
    run = Tuning(_plan(tmp_path, allowed=Allowed(threads=(2,), instances=(2,))))
    with pytest.raises(ToolError, match="ask for more than the 2 cores"):
        _run(run)
    assert children.loads == []


@pytest.mark.parametrize(
    ("tensor", "images"),
    [
        ("data_type: TYPE_FP32 dims: [ 192 ] reshape { shape: [ 3, 8, 8 ] }", True),
        ("data_type: TYPE_FP16 dims: [ 3, -1, -1 ]", True),
        ("data_type: TYPE_INT64 dims: [ 3, 8, 8 ]", False),
        ("data_type: TYPE_FP32 dims: [ 8, 8 ]", False),
    ],
)
def test_images(tmp_path: Path, children: _Children, tensor: str, images: bool) -> None:
    """channels_last is tried for models with batches of images."""
    text = _CONFIG.replace("data_type: TYPE_FP32 dims: [ 4 ]", tensor, 1)
    tried = _run(Tuning(_plan(tmp_path, text, allowed=_QUICK)))
    assert any("channels_last" in candidate for candidate in tried) == images


def test_divided_models(tmp_path: Path, children: _Children) -> None:
    """A model that DEVICE_MAP spreads over devices is tried in eager only."""
    children.kind = "MODULE"
    text = (
        _CONFIG
        + """
instance_group [{ kind: KIND_MODEL count: 1 }]
parameters { key: "DEVICE_MAP" value { string_value: "devices.json" } }
"""
    )
    tried = _run(Tuning(_plan(tmp_path, text, allowed=_QUICK)))
    assert {candidate.partition(",")[0] for candidate in tried} == {"eager"}
