"""The order of the measurements, their rows after failures, and the choice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from torch_py_backend.config import pbtxt, threads
from torch_py_backend.errors import LoadError, TuneError
from torch_py_backend.processes import child_process
from torch_py_backend.tools import tuning
from torch_py_backend.tools.candidates import Allowed, Candidate
from torch_py_backend.tools.tuning import Measured, Plan, Prefer, Row, Tuning

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
        "max_error": 1e-4,
        "prefer": Prefer.THROUGHPUT,
        "inputs": None,
        "rounds": 2,
        "seconds": 0.1,
        "timeout_s": 60.0,
    }
    return Plan(**(plain | changes))


class _Children:
    """A substitute of child processes that records its calls."""

    def __init__(self, kind: str = "MODULE") -> None:
        self.kind = kind
        self.calls: list[tuple[dict[str, str], int]] = []
        self.arguments: list[Sequence[Mapping[str, Any]]] = []
        self.throughput: dict[str, float] = {}
        self.fails: dict[str, BaseException] = {}

    def __call__(
        self, model: str, task: str, arguments: Sequence[Mapping[str, Any]], seconds: float
    ) -> list[Any]:
        self.arguments.append(arguments)
        document = json.loads(arguments[0]["arguments"]["model_config"])
        settings = {key: value["string_value"] for key, value in document["parameters"].items()}
        if task.endswith(":prepare"):
            return [{"kind": self.kind, "inputs": "made-up values"}]
        self.calls.append((settings, len(arguments)))
        name = settings.get("OPTIMIZE", "none")
        if name in self.fails:
            raise self.fails[name]
        speed = self.throughput.get(name, 10.0) * int(settings["NUM_THREADS"])
        return [
            {
                "latency_ms": 1.0 + number,
                "p99_ms": 2.0 + number,
                "throughput": {"1": speed, "2": 2 * speed},
                "memory_mb": 1.0,
                "device_memory_mb": 0.0,
                "error": 0.0,
                "load_s": 1.0,
            }
            for number in range(len(arguments))
        ]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> _Children:
    children = _Children("TORCHSCRIPT")
    monkeypatch.setattr(child_process, "run_together", children)
    monkeypatch.setattr(threads, "available_cores", lambda: 2)
    return children


def _quiet(candidate: Candidate, done: int, total: int) -> None:
    assert 0 <= done < total
    assert candidate.instances >= 1


def test_candidates_take_turns(tmp_path: Path, children: _Children) -> None:
    """Candidates are measured A B A B, so that a drift of the machine affects all of them."""
    Tuning(_plan(tmp_path, allowed=Allowed(quick=True))).run(_quiet)
    order = [(settings.get("OPTIMIZE"), settings["NUM_THREADS"]) for settings, _ in children.calls]
    assert order == [(None, "2"), (None, "1"), ("freeze", "1")] * 2


def test_best_are_spread(tmp_path: Path, children: _Children) -> None:
    """After the screening, threads and instances vary; known candidates get more rounds."""
    children.throughput = {"freeze": 50.0}
    run = Tuning(_plan(tmp_path, rounds=1))
    run.run(_quiet)
    tried = [
        (settings.get("OPTIMIZE"), settings["NUM_THREADS"], count)
        for settings, count in children.calls
    ]
    assert tried == [
        (None, "2", 1),
        (None, "1", 1),
        ("freeze", "1", 1),
        *[("freeze", "2", 1), ("freeze", "1", 1), ("freeze", "1", 2)],
        *[(None, "2", 1), (None, "1", 1), (None, "1", 2)],
    ]
    assert [row.rounds for row in run.rows] == [2, 2, 2, 1, 1, 1]
    assert run.screened


def test_instances_together(tmp_path: Path, children: _Children) -> None:
    """Throughput and memory of instances add up; latency is the median, p99 the largest."""
    run = Tuning(_plan(tmp_path, allowed=Allowed(threads=(1,), instances=(2,))))
    run.run(_quiet)
    row = run.rows[-1]
    assert (row.candidate.instances, row.batch, row.throughput) == (2, 2, 40.0)
    assert (row.memory_mb, row.latency_ms, row.p99_ms) == (2.0, 1.5, 3.0)
    places = [one["place"] for one in children.arguments[-1]]
    assert [place[:2] for place in places] == [(0, 2), (1, 2)]
    assert len({place[2] for place in places}) == 1


def test_arguments(tmp_path: Path) -> None:
    """A candidate has its own settings and the rest of config.pbtxt."""
    arguments = _plan(tmp_path).arguments({"NUM_THREADS": "7"}, 3, 1)
    document = json.loads(arguments["model_config"])
    assert document["parameters"] == {
        "WARMUP": {"string_value": "off"},
        "NUM_THREADS": {"string_value": "7"},
    }
    assert document["instance_group"][0]["count"] == 3
    assert arguments["model_instance_name"] == "digits_0_1"


def test_compilers_may_not_give_up(tmp_path: Path, children: _Children) -> None:
    """A candidate must compile, and not into the model's cache."""
    Tuning(_plan(tmp_path, allowed=Allowed(quick=True), rounds=1)).run(_quiet)
    current, *others = (settings for settings, _ in children.calls)
    assert "COMPILE_REQUIRED" not in current
    assert all(one["COMPILE_REQUIRED"] == "true" for one in others)
    assert not any(one["COMPILE_CACHE_DIR"].startswith(str(tmp_path)) for one in (current, *others))


def test_current(tmp_path: Path) -> None:
    """The current settings are a candidate, with the parameters' own names."""
    current = _plan(tmp_path).current()
    assert (dict(current.parameters), current.instances) == ({"NUM_THREADS": "2"}, 1)


def test_failure_is_a_row(tmp_path: Path, children: _Children) -> None:
    """A candidate that crashes is a row and is not tried again."""
    children.fails = {"freeze": LoadError("digits", "it crashed")}
    run = Tuning(_plan(tmp_path, allowed=Allowed(quick=True)))
    run.run(_quiet)
    assert [row.failure for row in run.rows] == ["", "", "model 'digits': it crashed."]
    assert [row.rounds for row in run.rows] == [2, 2, 0]
    assert len(children.calls) == 5


def test_interrupted(tmp_path: Path, children: _Children) -> None:
    """The measurements before an interrupt stay in the rows."""
    children.fails = {"freeze": KeyboardInterrupt()}
    run = Tuning(_plan(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        run.run(_quiet)
    assert [row.rounds for row in run.rows] == [1, 1]
    assert not run.screened


def test_nothing_to_try(tmp_path: Path, children: _Children) -> None:
    """Limits that leave nothing to try are refused before the measurements."""
    run = Tuning(_plan(tmp_path, allowed=Allowed(threads=(2,), instances=(2,))))
    with pytest.raises(TuneError, match="ask for more than the 2 cores"):
        run.run(_quiet)
    assert children.calls == []


@pytest.mark.parametrize(
    ("tensor", "images"),
    [
        ("data_type: TYPE_FP32 dims: [ 3, 8, 8 ]", True),
        ("data_type: TYPE_FP32 dims: [ 192 ] reshape { shape: [ 3, 8, 8 ] }", True),
        ("data_type: TYPE_FP16 dims: [ 3, -1, -1 ]", True),
        ("data_type: TYPE_INT64 dims: [ 3, 8, 8 ]", False),
        ("data_type: TYPE_FP32 dims: [ 8, 8 ]", False),
    ],
)
def test_images(tmp_path: Path, children: _Children, tensor: str, images: bool) -> None:
    """channels_last is tried for models with batches of images."""
    text = _CONFIG.replace("data_type: TYPE_FP32 dims: [ 4 ]", tensor, 1)
    Tuning(_plan(tmp_path, text, allowed=Allowed(quick=True))).run(_quiet)
    tried = [one.get("OPTIMIZE", "") for one, _ in children.calls]
    assert any("channels_last" in one for one in tried) == images


# --- rows and the choice ---------------------------------------------------------------------


def _measured(latency: float = 1.0, **changes: Any) -> Measured:
    plain: dict[str, Any] = {
        "p99_ms": 2.0,
        "throughput": {1: 10.0, 8: 40.0},
        "memory_mb": 100.0,
        "device_memory_mb": 0.0,
        "error": 0.0,
        "load_s": 1.0,
    }
    return Measured(latency, **(plain | changes))


def _row(name: str, latency: float, throughput: float, **changes: Any) -> Row:
    parameters = {"OPTIMIZE": changes.pop("optimize")} if "optimize" in changes else {}
    return Row(
        Candidate(name, parameters),
        **({"rounds": 3, "latency_ms": latency, "throughput": throughput} | changes),
    )


def test_row() -> None:
    """A row has the medians, the spread, the largest error and the first load time."""
    row = tuning.summarize(
        Candidate("eager", {}),
        [
            _measured(1.0, error=1e-6, load_s=9.0),
            _measured(3.0, throughput={1: 10.0, 8: 60.0}),
            _measured(2.0, throughput={1: 90.0, 8: 50.0}),
        ],
    )
    assert (row.latency_ms, row.latency_spread) == (2.0, 0.5)
    assert (row.batch, row.throughput, row.throughput_spread) == (8, 50.0, 0.2)
    assert (row.error, row.load_s, row.rounds) == (1e-6, 9.0, 3)


def test_failed_once() -> None:
    """A candidate that failed in one round is not chosen."""
    row = tuning.summarize(Candidate("eager", {}), [_measured()], "it crashed")
    assert (row.rounds, row.failure) == (0, "it crashed")
    assert not tuning.fits(row, 1.0)


_SLOW_AND_QUICK = [_row("throughput", 5.0, 100.0), _row("latency", 1.0, 50.0)]


@pytest.mark.parametrize(
    ("rows", "prefer", "choice"),
    [
        pytest.param([], Prefer.THROUGHPUT, None, id="nothing"),
        pytest.param([_row("a", 1, 1, error=0.2)], Prefer.THROUGHPUT, None, id="inexact"),
        pytest.param(
            [_row("a", 1, 99, error=0.2), _row("b", 1, 1)], Prefer.THROUGHPUT, "b", id="exact"
        ),
        pytest.param(
            [_row("a", 1, 99, failure="x"), _row("b", 1, 1)], Prefer.THROUGHPUT, "b", id="failed"
        ),
        pytest.param(_SLOW_AND_QUICK, Prefer.THROUGHPUT, "throughput", id="by-throughput"),
        pytest.param(_SLOW_AND_QUICK, Prefer.LATENCY, "latency", id="by-latency"),
        pytest.param(
            [_row("better", 1, 102, optimize="freeze"), _row("simpler", 1, 100)],
            Prefer.THROUGHPUT,
            "simpler",
            id="within-the-noise",
        ),
        pytest.param(
            [_row("better", 1, 120, optimize="freeze"), _row("simpler", 1, 100)],
            Prefer.THROUGHPUT,
            "better",
            id="beyond-the-noise",
        ),
        pytest.param(
            [
                _row("better", 1, 108, optimize="freeze", throughput_spread=0.2),
                _row("simpler", 1, 100),
            ],
            Prefer.THROUGHPUT,
            "simpler",
            id="within-its-spread",
        ),
        pytest.param(
            [
                _row("better", 1, 120, optimize="freeze"),
                _row("simpler", 1, 100, throughput_spread=0.9),
            ],
            Prefer.THROUGHPUT,
            "better",
            id="a-disturbed-round",
        ),
        pytest.param(
            [_row("b", 1, 100), _row("a", 1, 101)], Prefer.THROUGHPUT, "a", id="equally-simple"
        ),
    ],
)
def test_choice(rows: list[Row], prefer: Prefer, choice: str | None) -> None:
    """The best row within the tolerance is chosen; of those that differ by noise, the simplest."""
    chosen = tuning.choose(rows, 0.1, prefer)
    assert (chosen.candidate.title if chosen else None) == choice


def test_front() -> None:
    """A row is on the front unless another is better in one figure and no worse in the other."""
    rows = [
        _row("slow", 9.0, 90.0),
        _row("beaten", 9.0, 80.0),
        _row("quick", 1.0, 10.0),
        _row("middle", 5.0, 50.0),
        _row("beaten too", 6.0, 50.0),
    ]
    assert [row.candidate.title for row in tuning.front(rows)] == ["quick", "middle", "slow"]
