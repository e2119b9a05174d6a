"""The tables of scenarios on a real tritonserver, over HTTP and gRPC in turn: a server a table."""

from __future__ import annotations

import pytest
from scenarios import Scenario
from serving import TABLES, Serving

_ROWS = [
    (name, scenario, ("http", "grpc")[place % 2])
    for name, table in TABLES.items()
    for place, scenario in enumerate(table)
]


def _id(value: object) -> str | None:
    return value.name if isinstance(value, Scenario) else None


@pytest.mark.parametrize(
    ("serving", "scenario", "protocol"), _ROWS, indirect=["serving"], scope="module", ids=_id
)
def test_scenario(scenario: Scenario, protocol: str, serving: Serving) -> None:
    """What the table says happens, through a server and a client; a refused model says why."""
    state = serving.states[scenario.name]
    assert state.ready is not bool(scenario.load_error), state.reason
    _, *says = scenario.load_error or ("",)  # the name is not repeated in the reason
    assert all(part in state.reason for part in says), state.reason
    for call in scenario.calls:
        serving.check(protocol, scenario.name, call)
    for batch in scenario.batches:
        serving.check_together(scenario.name, batch)
    for part in scenario.logs:
        serving.until_logged(part)
