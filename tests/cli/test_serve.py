"""`serve`: its arguments, notes and event lines; tests/live/test_serve.py runs servers."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import command_line
import pytest
from command_line import fake_tritonserver

from torch_py_backend.server import serving, tritonserver
from torch_py_backend.server.supervisor import Event

# `cli.serve` is the command; other functions are in the module of the same name.
serve = importlib.import_module("torch_py_backend.cli.serve")


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
    address: str, restricted: str, exposed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: Any, **_: object) -> None:
        arguments[2](Event("READY", "m"))

    fake_tritonserver(tmp_path / "triton", "#!/bin/sh\n")
    monkeypatch.setattr(serving, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    options = [f"--address={address}", f"--restrict={restricted}", "--allow-empty"]
    triton = f"--tritonserver={tmp_path}/triton/bin/tritonserver"
    done = command_line.run("serve", str(tmp_path), triton, *options)
    assert done.stdout.endswith("\nREADY   m\nstopped\n"), done.stderr
    assert ("note    every client" in done.stdout) == bool(exposed)
    assert exposed in done.stdout


def test_a_full_disk_does_not_end_the_server(tmp_path: Path) -> None:
    fake_tritonserver(tmp_path / "triton", "#!/bin/sh\nexit 3\n")
    (tmp_path / "models/net").mkdir(parents=True)
    (tmp_path / "models/net/config.pbtxt").touch()
    arguments = [f"--{service}-port=0" for service in ("http", "grpc", "metrics", "health")]
    arguments.append("--tritonserver=triton/bin/tritonserver")  # relative to this folder
    with Path("/dev/full").open("wb") as file:
        ended = subprocess.run(
            [sys.executable, "-m", "torch_py_backend", "serve", "models", *arguments],
            cwd=tmp_path,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.stderr.startswith("error: tritonserver ended with exit code 3; its log says more")


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
