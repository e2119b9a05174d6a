"""Results of tune as tables, JSON and notes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from torch_py_backend.config import tuned_settings
from torch_py_backend.errors import ToolError
from torch_py_backend.tools import report
from torch_py_backend.tools.candidates import Allowed, Candidate
from torch_py_backend.tools.ranking import Figures, Goal, Limits, Row
from torch_py_backend.tools.tuning import Plan, Tuning


def _printed(table: Table, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0.00"),
        (0.0698, "0.070"),
        (1.234, "1.23"),
        (99.04, "99.0"),
        (1e4, "10,000"),
    ],
)
def test_three_digits(value: float | None, text: str) -> None:
    """Figures have about three digits, and no exponent."""
    assert report.three_digits(value) == text


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A file that cannot be written is an error, and nothing is left of it."""
    report.write_json(tmp_path / "a.json", {"a": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    (tmp_path / "folder").mkdir()
    with pytest.raises(ToolError, match=r"cannot write .*folder: Is a directory"):
        report.write_json(tmp_path / "folder", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "folder"]


def test_written_link(tmp_path: Path) -> None:
    """A link stays a link; its target is replaced and keeps its permissions."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch(mode=0o600)
    link.symlink_to(target)
    report.write(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600


# --- tune ------------------------------------------------------------------------------------

_MEASURED: dict[str, Any] = {
    "rounds": 3, "latency_ms": 1.234, "batch": 8, "throughput": 12345.6, "memory_mb": 321.0,
    "load_s": 4.0,
}  # fmt: skip
_EAGER = Row(Candidate("eager", {"NUM_THREADS": "2"}), **_MEASURED)
_GAINS = {"latency_gain": 2.468, "throughput_gain": 1.5, "throughput_spread": 0.07}
_FROZEN = Row(
    Candidate("freeze", {}, 3), **(_MEASURED | _GAINS | {"latency_ms": 0.5, "throughput": 150.0})
)
_WRONG = Row(Candidate("[bold]bf16", {}), **_MEASURED, error=0.2)
_FAILED = Row(Candidate("compile", {}), failure="model 'digits': it hangs [/].")
_ROWS = [_EAGER, _FROZEN, _WRONG, _FAILED]


def _rows(*arguments: Any) -> list[str]:
    lines = _printed(report.tuning_table(*arguments), 120)
    return [" ".join(line.split()) for line in lines]


def test_tuning_table() -> None:
    """The table has each candidate's settings, figures, gains and result."""
    lines = _rows(_ROWS, Limits(0.1), _FROZEN)
    assert "eager 2 x 1 1.23 1.00 12,346 1.00 321 0 4.0 untuned" in lines
    assert "freeze auto x 3 0.50 2.47 150 1.50 7% 321 0 4.0 chosen" in lines
    assert "[bold]bf16 auto x 1 1.23 1.00 12,346 1.00 0% 321 2e-01 4.0 inexact" in lines
    assert "compile auto x 1 failed" in lines
    assert "GPU MB" not in " ".join(lines)


def test_limit_of_p99(tmp_path: Path) -> None:
    """Figures of several batch sizes, and which max_batch_size is the best within the limit."""
    late = Row(Candidate("eager", {}), **_MEASURED, p99_ms=30.0)
    lines = _rows([late], Limits(0.1, 20.0), None)
    assert "gain ± p99 ms MB" in " ".join(lines)
    assert "eager auto x 1 1.23 1.00 12,346 1.00 30.0 321 0 4.0 late" in lines
    document = {"max_batch_size": 8}
    plan = Plan(tmp_path, "1", document, Allowed(), Limits(0.1, 20.0), Goal.BOTH, None, 60.0)
    run = Tuning(plan)
    assert report.best_size(run) == "no batch answers within 20 ms"
    run.sizes = {2: Figures(1.0, 50.0, 9.0), 4: Figures(1.0, 80.0, 18.0), 8: Figures(1.0, 99.0, 40)}
    assert "4 18.0 80.0" in [
        " ".join(line.split()) for line in _printed(report.sizes_table(run.sizes), 80)
    ]
    best = "within 20 ms: the most rows/s with batches of 4"
    assert report.best_size(run) == f"{best}; max_batch_size is 8: set it to 4"
    document["max_batch_size"] = 4
    assert report.best_size(run) == best
    assert report.tuning_entry(run)["sizes"][4]["p99_ms"] == 18.0


def test_tuning_line() -> None:
    """A line has both figures and both gains, or the failure."""
    line = "freeze, auto threads x 3: 0.50 ms (2.47), 150 rows/s (1.50)"
    assert report.tuning_line(_FROZEN) == line
    assert report.tuning_line(_FAILED).endswith(": model 'digits': it hangs [/].")


def test_memory_of_a_gpu() -> None:
    """GPU memory has a column if a GPU was used."""
    lines = _rows(
        [Row(Candidate("eager", {}), **_MEASURED, device_memory_mb=77.0)], Limits(0.1), None
    )
    assert "MB GPU MB error" in " ".join(lines)
    assert "321 77 0 4.0" in " ".join(lines)


@pytest.mark.parametrize(("instances", "gpu_mb", "told"), [(1, 5, 0), (2, 0, 0), (2, 5, 1)])
def test_instances_of_a_gpu(instances: int, gpu_mb: float, told: int) -> None:
    """The table does not show what instances of one GPU would gain otherwise."""
    row = Row(Candidate("eager", {}, instances), **_MEASURED, device_memory_mb=gpu_mb)
    assert report.instances_note([_EAGER, row]).count("MPS") == told


def test_tuning_entry(tmp_path: Path) -> None:
    """An entry of tuned.json has the machine, the rows and the choice, and is strict JSON."""
    plan = Plan(tmp_path, "1", {}, Allowed(), Limits(0.1), Goal.BOTH, None, 60.0)
    run = Tuning(plan)
    assert report.tuning_entry(run)["chosen"] is None
    run.rows = _ROWS
    document = json.loads(json.dumps(report.tuning_entry(run), allow_nan=False))
    assert document["machine"] == tuned_settings.machine_facts()
    assert document["conditions"]["for"] == "both"
    assert document["chosen"] == {
        "parameters": {},
        "instances": 3,
        "latency_ms": 0.5,
        "latency_gain": 2.468,
        "throughput": 150.0,
        "throughput_gain": 1.5,
    }
    titles = [row["candidate"]["title"] for row in document["rows"]]
    assert titles == ["eager", "freeze", "[bold]bf16", "compile"]
    assert document["rows"][0]["candidate"]["parameters"] == {"NUM_THREADS": "2"}
