"""`make demo`: examples/demo.py with a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import demo
import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.server
@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    """All checks pass; each step has a line, and the table and the picture have its figures."""
    done = subprocess.run(
        [sys.executable, _EXAMPLES / "demo.py", f"--output={tmp_path}/demo.png", "--seconds=0.1"],
        env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "100"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    output = done.stdout
    assert done.returncode == 0, output
    titles = ["Server", "Answers", "Memory", "Bad", "Throughput", "Stream", "Recovery"]
    for number, title in enumerate(titles, 1):
        assert f"\n{number}/{len(titles)}  {title} " in output
    assert "serves 5 models in 11 processes" in output
    assert f" {demo.GOOD_REQUESTS} of {demo.GOOD_REQUESTS} │" in output
    assert demo.PROMPT in output
    assert demo.NEXT in output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["demo.png"]
