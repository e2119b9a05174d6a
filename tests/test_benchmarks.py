from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import benchmarks

_COMMANDS = [
    path.stem
    for path in sorted(Path(benchmarks.__path__[0]).glob("*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", _COMMANDS)
def test_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out
