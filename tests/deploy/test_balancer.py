"""deploy/haproxy.cfg: what clients notice of hosts that leave, fall and hang, under load."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import balanced
import pytest
from balanced import Balancer, Host, Load

pytestmark = [pytest.mark.server, pytest.mark.slow]

_CLIENTS = 3  # of each protocol
_DEPLOY = Path(__file__).parents[2] / "deploy"
_SCALED_OBJECT = _DEPLOY / "kustomize" / "components" / "keda" / "scaled-object.yaml"
_AUTOSCALERS = (
    _SCALED_OBJECT,
    _DEPLOY / "kserve" / "inference-service.yaml",
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Three hosts."""
    with balanced.hosts(tmp_path_factory.mktemp("hosts"), (1, 2, 3)) as running:
        yield running


@pytest.fixture(scope="module")
def balancer(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balancer]:
    """HAProxy in front of them."""
    with balanced.balancer(tmp_path_factory.mktemp("balancer"), hosts) as running:
        yield running


def test_a_rolling_restart_with_a_new_version_loses_nothing(
    hosts: list[Host], balancer: Balancer
) -> None:
    """Host after host leaves and comes back with version 2: every request is answered."""
    with Load(_CLIENTS) as load:
        load.go_on(50)
        assert load.versions() == {1.0}
        for host in hosts:
            host.publish(2)
            host.restart()
            balancer.until("UP", host)
        told = len(load.asked)
        load.go_on(100)
    assert load.failures == []
    # Those under way when the last host left may still have the old version.
    assert load.versions(told + 2 * _CLIENTS) == {2.0}
    assert all(host.answered() > 0 for host in hosts)


def test_a_host_that_is_killed_takes_only_its_own_requests_along(
    hosts: list[Host], balancer: Balancer
) -> None:
    """Kill -9: what it held may be tried again, and nothing that was sent afterwards fails."""
    with Load(_CLIENTS) as load:
        load.go_on(50)
        # Clients that are slow may hold nothing at one moment or another.
        for stub in hosts[0].served.stubs(balanced.MODEL):
            stub.suspend()
        balanced.until(lambda: balancer.held(hosts[0]) > 0, lambda: str(balancer.states()))
        hosts[0].kill()
        killed = time.monotonic()
        load.go_on(100)
        hosts[0].start()
        hosts[0].served.wait_loaded()
        balancer.until("UP", *hosts)
        load.go_on(50)
    assert load.failures
    assert all(one.retryable and one.sent < killed for one in load.failures), load.failures
    assert len(load.failures) <= 2 * _CLIENTS
    assert hosts[0].answered() > 0


def test_a_large_request_that_is_cut_off_harms_no_other(tmp_path: Path) -> None:
    """HAProxy answers before it has read the body, and says that the connection ends there."""
    assert set(balanced.failures_of_breaking_host(tmp_path, 400)) == {"HTTP 503"}


def test_a_host_that_hangs_is_given_up(hosts: list[Host], balancer: Balancer) -> None:
    """SIGSTOP: what it held may be tried again, the others serve; restarted, it is back."""
    host = hosts[1]
    with Load(_CLIENTS) as load:
        load.go_on(50)
        host.freeze()
        balancer.until("DOWN", host)
        down = time.monotonic()
        load.go_on(100)
        # Not woken up: a tritonserver of 24.10 may die of the gRPC calls that were cancelled then.
        host.kill()
        host.start()
        host.served.wait_loaded()
        balancer.until("UP", *hosts)
        load.go_on(50)
    assert load.failures
    assert all(one.retryable and one.sent < down for one in load.failures), load.failures
    # None came to it twice: while it hangs it has more requests under way than the others.
    assert len(load.failures) <= 2 * _CLIENTS
    assert host.answered() > 0


def test_a_host_whose_model_falls_gets_no_requests(hosts: list[Host], balancer: Balancer) -> None:
    """Once it is not ready, nothing fails: the others answer until its model was loaded again."""
    host = hosts[2]
    with Load(_CLIENTS) as load:
        load.go_on(50)
        for stub in host.served.stubs(balanced.MODEL):
            stub.kill()
        balancer.until("NOLB", host)
        aside = time.monotonic()
        balancer.until("UP", host)
        load.go_on(50)
    assert all(one.sent < aside for one in load.failures), load.failures


_BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]})


@pytest.mark.usefixtures("balancer")
@pytest.mark.parametrize(
    ("length", "status"),
    [
        ("99999999999", 400),
        ("-1", 400),
        ("5, 99999999999", 400),
        ("abc", 400),
        (str(len(_BODY)), 200),
    ],
)
def test_header_that_ends_newer_servers(length: str, status: int) -> None:
    """A length that is no number of nine digits gets 400 from HAProxy; others reach Triton."""
    with contextlib.closing(
        http.client.HTTPConnection(f"{balanced.FRONT}:8000", timeout=60)
    ) as connection:
        path = f"/v2/models/{balanced.MODEL}/infer"
        connection.request("POST", path, _BODY, {"Inference-Header-Content-Length": length})
        response = connection.getresponse()
        text = response.read().decode()
    assert response.status == status, text
    assert ("<html>" in text) is (status == 400)


def test_grpc_clients_of_a_service_follow_the_replicas(tmp_path: Path) -> None:
    """Connections that end now and then, as in deploy/kustomize: a restart loses no request."""
    ageing = ["--grpc-max-connection-age=1000"]
    with (
        balanced.hosts(tmp_path, (4, 5), ageing) as members,
        balanced.service(tmp_path, members) as service,
        Load(2, service=True) as load,
    ):
        load.go_on(20)
        members[0].restart()
        service.until("UP", *members)
        # It is new, and would have been asked for nothing.
        balanced.until(lambda: members[0].answered() > 0, lambda: str(load.failures))
    assert load.failures == []


@pytest.mark.parametrize("path", _AUTOSCALERS, ids=lambda path: path.parent.name)
def test_metrics_of_the_autoscaler(hosts: list[Host], path: Path) -> None:
    """Each metric that an autoscaler's queries read is one of a running server's."""
    names = set(re.findall(r"\b(?:nv|pytorch_py)_\w+", path.read_text(encoding="utf-8")))
    # Of decoupled models only: its queries do without it.
    names.discard("pytorch_py_live_streams")
    text = hosts[0].metrics()
    assert names
    assert all(re.search(rf"^{name}\{{", text, flags=re.MULTILINE) for name in names)


@pytest.mark.usefixtures("balancer")
def test_requests_in_flight(hosts: list[Host]) -> None:
    """Seconds that requests took, per second, are the requests in flight: queued and running."""
    name = "nv_inference_request_duration_us"
    assert f"rate({name}{{" in _SCALED_OBJECT.read_text(encoding="utf-8")
    with Load(_CLIENTS) as load:
        load.go_on(20)
        before, begin = sum(host.total(name) for host in hosts), time.monotonic()
        load.go_on(200)
        took = sum(host.total(name) for host in hosts) - before
        in_flight = took / 1e6 / (time.monotonic() - begin)
    # At most as many as there are clients; how long these need themselves is the machine's matter.
    assert 0.1 < in_flight < 2.2 * _CLIENTS
