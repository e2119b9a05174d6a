"""`torch-py-backend serve` in a process of its own: its log, processes, endpoints and regions."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import living
import numpy as np
import psutil
import tritonclient.grpc
import tritonclient.http

from torch_py_backend.processes import instance_status
from torch_py_backend.processes.instance_status import InstanceState

_SERVE = "from torch_py_backend.cli import app; app()"
# Free ones.
PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--health-port=0")
_SERVING = re.compile(
    r"(?:serving|listening) on http://(\S+) and grpc://(\S+);"
    r" metrics on http://(\S+)/metrics, readiness on http://(\S+)/ready"
)
# How long Triton waits for open connections, and for instances that do not answer.
EXIT = "--exit-timeout-secs=5"
LONGEST_S = 240.0


class Supervised:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log
        self._start = 0
        self.http = self.grpc = self.metrics = self.health = ""

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def text(self) -> str:
        """The log since the last call of `skip_log`."""
        return self.log[self._start :]

    def skip_log(self) -> None:
        self._start = len(self.log)

    def wait_loaded(self) -> None:
        match = until(lambda: _SERVING.search(self.text), self)
        self.http, self.grpc, self.metrics, self.health = match.groups()

    def family(self) -> list[psutil.Process]:
        return living.descendants(self.process.pid)

    def triton(self) -> psutil.Process:
        # Its own child has its name, too, until it becomes an instance.
        children = living.left(psutil.Process(self.process.pid).children())
        (server,) = filter(_is_triton, children)
        return server

    def prefix(self) -> str:
        return prefix(self.triton())

    def stubs(self, model: str) -> list[psutil.Process]:
        return [
            process
            for process in living.descendants(self.triton().pid)
            if "_backend_stub " in (command := living.command(process)) and f"/{model}/" in command
        ]

    def in_state(self, model: str, state: InstanceState) -> list[psutil.Process]:
        processes: list[psutil.Process] = []
        # It is just starting, or not there.
        with contextlib.suppress(psutil.Error, KeyError, ValueError):
            folder = Path(self.triton().environ()[instance_status.VARIABLE])
            for path in instance_status.files(folder):
                with contextlib.suppress(psutil.Error, OSError, ValueError):
                    reader = instance_status.Reader(path)
                    if reader.identity.model == model and reader.read().state is state:
                        processes.append(psutil.Process(reader.identity.pid))
        return processes

    def ask(self, path: str) -> tuple[int, dict[str, Any]]:
        client = http.client.HTTPConnection(self.health, timeout=30)
        client.request("GET", path)
        response = client.getresponse()
        document: dict[str, Any] = json.loads(response.read())
        client.close()
        return response.status, document

    def ready(self, model: str) -> bool:
        return self.ask(f"/ready/{model}")[0] == 200

    def infer(self, model: str, value: float, seconds: float = 60.0) -> list[float]:
        with tritonclient.grpc.InferenceServerClient(self.grpc) as client:
            return _infer(tritonclient.grpc, client, model, value, client_timeout=seconds)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)


def _is_triton(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.name() == "tritonserver")
    return False


def _infer(module: Any, client: Any, model: str, value: float, **how: Any) -> list[float]:
    tensor = module.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.full((1, 4), value, dtype=np.float32))
    values: list[float] = client.infer(model, [tensor], **how).as_numpy("y")[0].tolist()
    return values


class Steady:
    """A model under constant requests over both protocols; each answer is checked."""

    def __init__(self, served: Supervised, model: str) -> None:
        self.failures: list[str] = []
        self.answers = 0
        self._stop = threading.Event()
        addresses = {tritonclient.http: served.http, tritonclient.grpc: served.grpc}
        self._threads = [
            threading.Thread(target=self._ask, args=(*one, model), daemon=True)
            for one in addresses.items()
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, module: Any, address: str, model: str) -> None:
        client = module.InferenceServerClient(address)
        while not self._stop.wait(0.1):
            try:
                values = _infer(module, client, model, 3.0)
                if values != [-3.0] * 4:
                    self.failures.append(str(values))
            except Exception as error:
                self.failures.append(repr(error))
            self.answers += 1
        client.close()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


@contextlib.contextmanager
def serve(
    repository: Path | str,
    *arguments: str,
    within: Sequence[str] = (),
    triton: Sequence[str] = (),
    python: str | Path = sys.executable,
    verbose: str = "--verbose",
    **variables: str,
) -> Iterator[Supervised]:
    """Run `serve` on a repository, `within` another command, and kill the processes that it leaves.

    More arguments are for `serve`, those in `triton` for tritonserver.
    """
    command = [str(python), "-c", _SERVE, "serve", str(repository), *PORTS]
    command += [verbose] if verbose else []
    with tempfile.NamedTemporaryFile(prefix="serve-", suffix=".log") as log:
        # Not a pipe: a server that outlives its `serve` would hold its other end.
        process = subprocess.Popen(
            [*within, *command, *arguments, "--", EXIT, *triton],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TERM": "dumb"} | variables,
        )
        served = Supervised(process, Path(log.name))
        try:
            yield served
            if process.poll() is None:
                served.end()
        finally:
            living.kill(process)


def until(what: Callable[[], Any], served: Supervised) -> Any:
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        if value := what():
            return value
        time.sleep(0.1)
    raise AssertionError(served.text[-20000:])


def prefix(triton: psutil.Process) -> str:
    """The start of the names of a tritonserver's shared memory."""
    match = re.search(r"shm-region-prefix-name=(\S+)", living.command(triton))
    assert match
    return match[1]


def regions(prefix: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{prefix}*"))
