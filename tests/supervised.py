"""`torch-py-backend serve` in a process of its own: its log, processes, endpoints and regions."""

from __future__ import annotations

import contextlib
import http.client
import itertools
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import living
import numpy as np
import psutil
import tritonclient.grpc
import tritonclient.http
from children import until
from serving import EXIT, infer_inputs
from tritonclient.utils import InferenceServerException

from torch_py_backend.processes import instance_status
from torch_py_backend.processes.instance_status import InstanceState

if TYPE_CHECKING:
    from typing_extensions import Self

_SERVE = "from torch_py_backend.cli import app; app()"
# Free ones.
PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--health-port=0")
_SERVING = re.compile(
    r"(?:serving|listening) on http://(\S+) and grpc://(\S+);"
    r" metrics on http://(\S+)/metrics, readiness on http://(\S+)/ready"
)


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

    def until(self, what: Callable[[], Any]) -> Any:
        return until(what, lambda: self.text)

    def until_told(self, says: str) -> None:
        self.until(lambda: says in self.text)

    def wait_loaded(self) -> None:
        match = self.until(lambda: _SERVING.search(self.text))
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
        inputs = infer_inputs(tritonclient.grpc, {"x": np.full((1, 4), value, dtype=np.float32)})
        with tritonclient.grpc.InferenceServerClient(self.grpc) as client:
            result = client.infer(model, inputs, client_timeout=seconds)
        values: list[float] = result.as_numpy("y")[0].tolist()
        return values

    def load(self, model: str) -> Load:
        return Load(self.http, self.grpc, model)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)


def _is_triton(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.name() == "tritonserver")
    return False


@dataclass(frozen=True)
class Asked:
    """One request: when it was sent, and the answer, or how it failed."""

    sent: float
    answer: tuple[float, ...]
    failure: str


class Load:
    """Clients of both protocols, each of which sends a request once the last one is answered.

    Each x is full of 3; every tenth is as `wide` as that.
    """

    def __init__(
        self, http: str, grpc: str, model: str, *, count: int = 1, wide: int = 4, pause: float = 0.1
    ) -> None:
        self.asked: list[Asked] = []
        self._model, self._wide, self._pause = model, wide, pause
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=one, daemon=True)
            for one in ((tritonclient.http, http), (tritonclient.grpc, grpc)) * count
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)

    def _ask(self, module: Any, address: str) -> None:
        with module.InferenceServerClient(address) as client:
            for number in itertools.count(1):
                if self._over.wait(self._pause):
                    return
                x = np.full((1, 4 if number % 10 else self._wide), 3.0, dtype=np.float32)
                sent, answer, failure = time.monotonic(), [], ""
                try:
                    result = client.infer(self._model, infer_inputs(module, {"x": x}))
                    answer = result.as_numpy("y")[0].tolist()
                except InferenceServerException as error:
                    failure = str(error.status())
                except Exception as error:
                    failure = repr(error)
                self.asked.append(Asked(sent, tuple(answer), failure))
                if failure:
                    time.sleep(0.1)  # as clients that try again do

    @property
    def failures(self) -> list[Asked]:
        return [one for one in self.asked if one.failure]

    def answers(self, since: int = 0) -> set[tuple[float, ...]]:
        return {one.answer for one in self.asked[since:] if not one.failure}

    def go_on(self, answers: int) -> None:
        """Wait until there are so many answers more."""
        wanted = len(self.asked) - len(self.failures) + answers
        until(lambda: len(self.asked) - len(self.failures) >= wanted)


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


def prefix(triton: psutil.Process) -> str:
    """The start of the names of a tritonserver's shared memory."""
    match = re.search(r"shm-region-prefix-name=(\S+)", living.command(triton))
    assert match
    return match[1]


def regions(prefix: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{prefix}*"))
