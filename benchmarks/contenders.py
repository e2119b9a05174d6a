"""Install, start and stop the servers that our backend is compared with.

A peer has a virtual environment of its own in the user's cache folder. It is made at first use from
`peers/requirements-<name>.txt` under `constraints.txt`, and again when one of them changes. Its log
is beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks import clients
from benchmarks.clients import Endpoint
from benchmarks.models import MODELS
from torch_py_backend.errors import ToolError, summarize
from torch_py_backend.server.tritonserver import choose_ports

ROOT = Path(__file__).parents[1]
_PEERS = Path(__file__).parent / "peers"
_START_SECONDS = 180
_STOP_SECONDS = 20
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Peer:
    """Another server.

    Attributes:
        title: its name.
        package: its package on PyPI.
        protocol: its fastest protocol, as in `clients.Endpoint`.
        path: the path of a POST, with the model's name in braces; for Triton's protocols the name.
        words: its configuration and protocol, for the report.
    """

    title: str
    package: str
    protocol: str
    path: str
    words: str


PEERS = {
    "litserve": Peer(
        "LitServe",
        "litserve",
        "bytes",
        "predict",
        "`max_batch_size`, `batch_timeout` of 1 ms, `fast_queue`, one worker; HTTP, raw bytes",
    ),
}


def check(endpoint: Endpoint, least: float = 0.0) -> None:
    """Compare the example's answer with eager PyTorch on the CPU.

    Args:
        endpoint: the server.
        least: the smallest tolerance.

    Raises:
        ToolError: the answer is wrong.
    """
    model = MODELS[endpoint.model]
    tolerance = max(model.tolerance, least)
    actual, expected = clients.answer(endpoint), model.expected().numpy()
    if actual.shape != expected.shape or not np.allclose(
        actual, expected, rtol=tolerance, atol=tolerance
    ):
        raise ToolError(
            f"{endpoint.served} at {endpoint.host} answers {actual.flatten()[:4]}… of shape"
            f" {actual.shape}; expected {expected.flatten()[:4]}… of shape {expected.shape},"
            " as eager PyTorch says."
        )


@contextlib.contextmanager
def started(name: str, model: str) -> Iterator[Endpoint]:
    """Start a peer with a model, and check its answer.

    Raises:
        ToolError: the peer cannot be installed, does not start, or its answer is wrong.
    """
    peer, python = PEERS[name], environment(name)
    (port,) = choose_ports("", [0])
    endpoint = Endpoint(model, peer.protocol, f"127.0.0.1:{port}", peer.path.format(model=model))
    command = [str(python), "-m", f"benchmarks.peers.{name}"]
    command += ["--model", model, "--port", str(port)]
    # Kept beside the environment: too long for a report.
    with (
        (_cache() / f"{name}.log").open("wb") as log,
        tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch,
    ):
        process = subprocess.Popen(  # noqa: S603  the environment made above
            command,
            cwd=ROOT,
            env=_variables(python, scratch),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            _wait(peer, process, endpoint)
            yield endpoint
        finally:
            stop(process)


def _variables(python: Path, scratch: str) -> dict[str, str]:
    """Return environment variables with the peer's Python first and a temporary folder."""
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    return os.environ | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "VIRTUAL_ENV": str(python.parents[1]),
        "TMPDIR": scratch,
    }


def _wait(peer: Peer, process: subprocess.Popen[bytes], endpoint: Endpoint) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        if process.poll() is not None:
            raise ToolError(
                f"{peer.title} ended with exit code {process.returncode}; its log says why."
            )
        try:
            check(endpoint)
        except ToolError:
            raise
        except Exception as error:  # each client has its own error for a refused connection
            if time.monotonic() > deadline:
                raise ToolError(
                    f"{peer.title} did not answer within {_START_SECONDS} s: {summarize(error)}."
                ) from None
            time.sleep(_POLL_SECONDS)
        else:
            return


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the peer as Ctrl-C does, then kill the rest of its processes."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    _signal_group(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    _signal_group(process.pid, signal.SIGKILL)
    for child in family:  # some have left the group
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(family, timeout=_STOP_SECONDS)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def environment(name: str) -> Path:
    """Return the Python of a peer's virtual environment; make it if it is missing or outdated.

    Raises:
        ToolError: pip cannot install its packages.
    """
    requirements = _PEERS / f"requirements-{name}.txt"
    constraints = ROOT / "constraints.txt"
    folder = _cache() / name
    python, stamp = folder / "bin" / "python", folder / "requirements.sha256"
    checksum = hashlib.sha256(requirements.read_bytes() + constraints.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == checksum:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--quiet", "--constraint", str(constraints), "--requirement", str(requirements)]
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)  # noqa: S603  this Python
        subprocess.run([python, "-m", "pip", "install", *options], check=True)  # noqa: S603  its pip
    except subprocess.CalledProcessError as error:
        raise ToolError(
            f"the environment of {PEERS[name].title} cannot be made: {error}; pip says why."
        ) from None
    stamp.write_text(checksum)
    return python


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torch-py-backend" / "benchmarks"


def version(name: str) -> str:
    """Return the installed version of a peer."""
    code = f"from importlib.metadata import version; print(version('{PEERS[name].package}'))"
    done = subprocess.run(  # noqa: S603  the environment's Python
        [environment(name), "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
