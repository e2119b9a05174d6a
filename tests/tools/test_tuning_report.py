"""The rows of a tuning run as a table, a plot and JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from torch_py_backend.errors import TuneError
from torch_py_backend.tools import tuning_report
from torch_py_backend.tools.candidates import Candidate
from torch_py_backend.tools.ranking import Row

_MEASURED: dict[str, Any] = {
    "rounds": 3,
    "latency_ms": 1.234,
    "p99_ms": 2.5,
    "batch": 8,
    "throughput": 12345.6,
    "throughput_spread": 0.07,
    "memory_mb": 321.0,
    "load_s": 4.0,
}
_EAGER = Row(Candidate("eager", {"NUM_THREADS": "2"}), **_MEASURED)
_FROZEN = Row(Candidate("freeze", {}, 3), **(_MEASURED | {"latency_ms": 0.5, "throughput": 150.0}))
_WRONG = Row(Candidate("[bold]bf16", {}), **_MEASURED, error=0.2)
_FAILED = Row(Candidate("compile", {}), failure="model 'digits': it hangs [/].")
_ROWS = [_EAGER, _FROZEN, _WRONG, _FAILED]


def _printed(*arguments: Any, width: int = 120) -> list[str]:
    written = io.StringIO()
    Console(width=width, file=written, color_system=None).print(tuning_report.table(*arguments))
    return [" ".join(line.split()) for line in written.getvalue().splitlines()]


def test_table() -> None:
    """The table has each candidate's settings, figures and result."""
    lines = _printed(_ROWS, 0.1, _EAGER)
    assert "eager 2 x 1 1.23 12,346 8 7% 321 0 4.0 chosen" in lines
    assert "freeze auto x 3 0.5 150 8 7% 321 0 4.0" in lines
    assert "[bold]bf16 auto x 1 1.23 12,346 8 7% 321 2e-01 4.0 inexact" in lines
    assert "compile auto x 1 failed" in lines


def test_memory_of_a_gpu() -> None:
    """GPU memory has a column if a GPU was used."""
    assert "GPU MB" not in " ".join(_printed([_EAGER], 0.1, None))
    row = Row(Candidate("eager", {}), **_MEASURED, device_memory_mb=77.0)
    lines = _printed([row], 0.1, None)
    assert "GPU MB" in " ".join(lines)
    assert "321 77 0 4.0" in " ".join(lines)


def test_failures() -> None:
    """Each failure is one sentence."""
    assert tuning_report.failures(_ROWS) == [
        "compile, auto threads x 1: model 'digits': it hangs [/]."
    ]


def test_entry() -> None:
    """An entry of tuned.json has the machine, the rows and the choice, and is strict JSON."""
    entry = tuning_report.entry({"cores": 2}, _ROWS, _FROZEN, {"rounds": 3})
    document = json.loads(json.dumps(entry, allow_nan=False))
    assert document["machine"] == {"cores": 2}
    assert document["chosen"] == {"parameters": {}, "instances": 3}
    assert [row["candidate"]["title"] for row in document["rows"]] == [
        "eager",
        "freeze",
        "[bold]bf16",
        "compile",
    ]
    assert tuning_report.entry({}, _ROWS, None, {})["chosen"] is None


@pytest.mark.parametrize("rows", [_ROWS, [_FAILED], [], [_WRONG], [_EAGER]])
def test_plot(tmp_path: Path, rows: list[Row]) -> None:
    """The plot is a PNG for any rows."""
    choice = rows[0] if rows and rows[0] is _EAGER else None
    tuning_report.plot(tmp_path / "a.png", "a [title] $x_", rows, 0.1, choice)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_plot_that_cannot_be_written(tmp_path: Path) -> None:
    """A missing folder is an error."""
    with pytest.raises(TuneError, match="cannot write"):
        tuning_report.plot(tmp_path / "nowhere" / "a.png", "title", _ROWS, 0.1, None)
