"""The tables of scenarios on a real tritonserver, over HTTP and gRPC: a server a table."""

from __future__ import annotations

import pytest
from scenarios import Scenario
from serving import TABLES, Serving

_SERVED = ("scenarios", "sequences", "refused", "kinds", "hooked")
_GOOD = [(name, one) for name in _SERVED for one in TABLES[name] if not one.load_error]
_BAD = [(name, one) for name in _SERVED for one in TABLES[name] if one.load_error]


def _id(value: object) -> str:
    return value.name if isinstance(value, Scenario) else ""


@pytest.mark.parametrize(
    ("serving", "scenario"), _GOOD, indirect=["serving"], scope="module", ids=_id
)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_answers(scenario: Scenario, protocol: str, serving: Serving) -> None:
    """What the table says happens, through a server and a client."""
    state = serving.states[scenario.name]
    assert state.ready, state.reason
    for call in scenario.calls:
        serving.check(protocol, scenario.name, call)
    for batch in scenario.batches:
        serving.check_together(scenario.name, batch)
    for part in scenario.logs:
        serving.until_logged(part)


@pytest.mark.parametrize(
    ("serving", "scenario"), _BAD, indirect=["serving"], scope="module", ids=_id
)
def test_refusals(scenario: Scenario, serving: Serving) -> None:
    """A model that cannot be served says why, while the others are served."""
    state = serving.states[scenario.name]
    assert not state.ready
    for part in scenario.load_error:
        assert part in state.reason
