"""deploy/systemd: a unit that lets `serve` leave in its own time."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
from deployed import DEPLOY

from torch_py_backend.cli import commands
from torch_py_backend.server import tritonserver

_UNIT = DEPLOY / "systemd" / "torch-py-backend.service"
_TEXT = _UNIT.read_text(encoding="utf-8")


def _service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]  # keys as they are written
    unit.read_string(_TEXT.replace("\\\n", " "))
    return unit["Service"]


def _arguments() -> dict[str, Any]:
    """What the command makes of its words."""
    program, command, *rest = shlex.split(_service()["ExecStart"])
    assert Path(program).name == "torch-py-backend"
    found = typer.main.get_command(commands).commands[command]  # type: ignore[attr-defined]
    with found.make_context(command, rest) as context:
        return dict(context.params)


def test_the_signal_is_for_serve_alone() -> None:
    """It drains, and ends tritonserver itself; nothing is killed before that took its time."""
    assert _service()["KillMode"] == "mixed"
    leaving = _arguments()["drain"] + tritonserver._EXIT_SECONDS + 2 * tritonserver._GRACE_SECONDS
    assert int(_service()["TimeoutStopSec"]) > leaving
    assert _service()["Restart"] == "always"


def test_it_serves_the_balancer() -> None:
    """As deploy/haproxy.cfg asks for: on all addresses, with a drain, and closed to strangers."""
    told = re.sub(r"[\s\\#]+", " ", (DEPLOY / "haproxy.cfg").read_text(encoding="utf-8"))
    arguments = _arguments()
    assert arguments["address"] == "0.0.0.0"
    assert f"--drain={arguments['drain']:g} " in told
    assert f"--restrict={arguments['restrict']} " in told
    assert "TORCH_PY_BACKEND_ADMIN_KEY" in _TEXT


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd's own tool")
def test_systemd_takes_it(tmp_path: Path) -> None:
    """Nothing in it is unknown or misspelt; only the program and the user are of the host's."""
    command, *_ = shlex.split(_service()["ExecStart"])
    path = tmp_path / _UNIT.name
    path.write_text(_TEXT.replace(command, "/bin/true"), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", path],
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
