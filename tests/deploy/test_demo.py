"""`make demo`: examples/demo.py with a real server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import demo
import living
import numpy as np
import psutil
import pytest
import supervised
from demo_models.networks import Network
from torch import nn

_EXAMPLES = Path(__file__).parents[2] / "examples"
_DEADLINE_S = 300


def _started(folder: Path) -> subprocess.Popen[str]:
    """Start the demo; its picture and its temporary files lie in the folder."""
    # A shell's job in the background ignores Ctrl-C, and so would the demo.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [
            sys.executable,
            str(_EXAMPLES / "demo.py"),
            f"--output={folder / 'demo.png'}",
            "--seconds=0.1",
        ],
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.server
@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    """All checks pass; each step has a line, and the table and the picture have its figures."""
    process = _started(tmp_path)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    titles = ["Server", "Answers", "Memory", "Bad", "Throughput", "Stream", "Recovery"]
    for number, title in enumerate(titles, 1):
        assert f"\n{number}/{len(titles)}  {title} " in output
    assert "serves 5 models in 11 processes" in output
    assert f" {demo.GOOD_REQUESTS} of {demo.GOOD_REQUESTS} │" in output
    assert demo.PROMPT in output
    assert demo.NEXT in output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["demo.png"]


@pytest.mark.server
@pytest.mark.slow
def test_interruption(tmp_path: Path) -> None:
    """After Ctrl-C no process, shared memory or file is left."""
    process = _started(tmp_path)
    deadline = time.monotonic() + _DEADLINE_S
    family: list[psutil.Process] = []
    commands = ""
    while "_backend_stub " not in commands:
        assert time.monotonic() < deadline
        assert process.poll() is None
        family = living.descendants(process.pid)
        commands = "\n".join(map(living.command, family))
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # to all processes, as a terminal does
    output, _ = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 130, output
    assert "Interrupted" in output
    assert "Traceback" not in output
    assert living.all_end(family)
    prefixes = set(re.findall(r"shm-region-prefix-name=(\S+)", commands))
    assert prefixes
    assert not any(supervised.regions(prefix) for prefix in prefixes)
    assert not list(tmp_path.iterdir())


class _Client:
    """Answers each request with the same result."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def infer(self, *_: object) -> Any:
        return mock.Mock(as_numpy=lambda _: self.result)


@pytest.mark.parametrize("wrong", [2.0, float("nan")])
def test_wrong_answers_fail(wrong: float) -> None:
    """The demo fails if a model does not answer as eager PyTorch does."""
    rows = np.ones((4, 3), dtype=np.float32)
    network = Network("net", "net_by_hand", "net", nn.Identity(), "x", "y", rows, rows)
    right = mock.Mock(client=_Client(rows[:1]))
    assert demo.largest_difference(right, "net", network) == 0
    server = mock.Mock(client=_Client(rows[:1] * wrong))
    with pytest.raises(demo.DemoError, match="net differs from eager PyTorch"):
        demo.largest_difference(server, "net", network)
