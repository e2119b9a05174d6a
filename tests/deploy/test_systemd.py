"""deploy/systemd: a unit that lets `serve` drain."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from deployed import DEPLOY, serve_arguments

from torch_py_backend.server import tritonserver

_UNIT = DEPLOY / "systemd" / "torch-py-backend.service"
_TEXT = _UNIT.read_text(encoding="utf-8")


@pytest.fixture
def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]  # case-sensitive keys
    unit.read_string(_TEXT.replace("\\\n", " "))
    return unit["Service"]


def test_stop(service: configparser.SectionProxy) -> None:
    """Only `serve` gets the signal, and systemd kills nothing before the drain has ended."""
    assert service["KillMode"] == "mixed"
    drain = serve_arguments(shlex.split(service["ExecStart"]))["drain"]
    stop = drain + tritonserver._EXIT_SECONDS + 2 * tritonserver._GRACE_SECONDS
    assert int(service["TimeoutStopSec"]) > stop
    assert service["Restart"] == "always"


def test_arguments_of_the_balancer(service: configparser.SectionProxy) -> None:
    """The unit has the address, drain and restrictions that deploy/haproxy.cfg requires."""
    balancer = re.sub(r"[\s\\#]+", " ", (DEPLOY / "haproxy.cfg").read_text(encoding="utf-8"))
    arguments = serve_arguments(shlex.split(service["ExecStart"]))
    assert arguments["address"] == "0.0.0.0"
    assert f"--drain={arguments['drain']:g} " in balancer
    assert f"--restrict={arguments['restrict']} " in balancer
    assert "TORCH_PY_BACKEND_ADMIN_KEY" in _TEXT


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_it(service: configparser.SectionProxy, tmp_path: Path) -> None:
    command, *_ = shlex.split(service["ExecStart"])
    path = tmp_path / _UNIT.name
    path.write_text(_TEXT.replace(command, "/bin/true"), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", path],
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
