"""`serve`: its arguments, notes and event lines; tests/live/test_serve.py runs servers."""

from __future__ import annotations

import importlib
import io
import os
import signal
from pathlib import Path
from typing import Any

import command_line
import pytest
from command_line import fake_tritonserver
from supervised import PORTS

from torch_py_backend.server import serving, tritonserver
from torch_py_backend.server.supervisor import Event

# `cli.serve` is the command; other functions are in the module of the same name.
serve = importlib.import_module("torch_py_backend.cli.serve")


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Arguments of a `serve` whose server loads a model, and stops."""

    def run(*arguments: Any, **_: object) -> None:
        arguments[2](Event("READY", "m"))

    executable = fake_tritonserver(tmp_path / "triton")
    monkeypatch.setattr(serving, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return "serve", str(tmp_path), f"--tritonserver={executable}", "--allow-empty", *PORTS


@pytest.mark.parametrize(
    ("address", "restricted", "exposed"),
    [
        ("127.0.0.1", "", ""),
        ("0.0.0.0", "", "endpoints model-repository, shared-memory, trace, logging;"),
        ("0.0.0.0", "trace,health", "endpoints model-repository, shared-memory, logging;"),
        ("0.0.0.0", ",".join(tritonserver.SENSITIVE), ""),
    ],
    ids=["loopback", "all", "some", "none"],
)
def test_endpoints_open_to_the_network_are_noted(
    address: str, restricted: str, exposed: str, arguments: tuple[str, ...]
) -> None:
    done = command_line.run(*arguments, f"--address={address}", f"--restrict={restricted}")
    assert done.stdout.endswith("\nREADY   m\nstopped\n"), done.stderr
    assert ("note    every client" in done.stdout) == bool(exposed)
    assert exposed in done.stdout


def test_a_full_disk_does_not_end_the_server(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        full = io.TextIOWrapper(file, write_through=True)
        assert command_line.run(*arguments, terminal=full).returncode == 0


def test_orphans_in_a_container_are_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As process 1, serve reaps processes whose parents died, but not the server."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    server = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
    orphan = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
    serve.reap_orphans(server)
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan, 0)
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    serve.reap_orphans(server)
    assert os.waitpid(server, 0) == (server, signal.SIGKILL)
    serve.reap_orphans(server)
