"""deploy/haproxy.cfg with a canary: a further host that gets a share of the requests."""

from __future__ import annotations

import time
from pathlib import Path

import balanced
import pytest
from balanced import Load

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_a_canary_gets_its_share(tmp_path: Path) -> None:
    """A tenth of the requests goes to the canary, and none while its model is loaded again."""
    with (
        balanced.hosts(tmp_path, (1,)) as (stable,),
        balanced.hosts(tmp_path, (4,), version=2) as (canary,),
    ):
        canary.name = "canary"
        with balanced.balancer(tmp_path, [stable], canary, percent=10) as balancer, Load(2) as load:
            balancer.until("UP", canary)
            begin = len(load.asked)
            load.go_on(400)
            answers = [request.answer for request in load.asked[begin:]]
            assert 0.04 < answers.count(2.0) / len(answers) < 0.17
            assert all(requests > 0 for _, requests in balancer.received(canary).values())
            for stub in canary.served.stubs(balanced.MODEL):
                stub.kill()
            balancer.until("NOLB", canary)
            aside, received = time.monotonic(), balancer.received(canary)
            load.go_on(5)
            snapshots = [received]
            while {state for state, _ in snapshots[-1].values()} == {"NOLB"}:
                assert snapshots[-1] == received
                snapshots.append(balancer.received(canary))
            balancer.until("UP", canary)
            begin = len(load.asked)
            balanced.until(lambda: 2.0 in load.versions(begin), lambda: str(load.failures))
    assert all(request.sent < aside for request in load.failures), load.failures
