"""The tables of scenarios on a real tritonserver, over HTTP and gRPC: a server a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scenarios import Scenario
from serving import TABLES, Serving
from tritonclient.utils import InferenceServerException

_ROWS = [(name, scenario) for name, table in TABLES.items() for scenario in table]
_GOOD = [(name, scenario) for name, scenario in _ROWS if not scenario.load_error]
_BAD = [(name, scenario) for name, scenario in _ROWS if scenario.load_error]


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


_X = {"x": np.ones((2, 4), dtype=np.float32)}


@pytest.mark.parametrize("serving", ["requests"], indirect=True, scope="module")
@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("inputs", "output", "message"),
    [
        ({"x": np.ones((2, 4), dtype=np.int64)}, "y", "data-type"),
        ({"x": np.ones((2, 5), dtype=np.float32)}, "y", "shape"),
        ({"x": np.ones((9, 4), dtype=np.float32)}, "y", "batch-size must be <= 8"),
        ({"y": np.ones((2, 4), dtype=np.float32)}, "y", "'y'"),
        ({}, "y", "expected 1 inputs but got 0"),
        (_X, "z", "unexpected inference output 'z'"),
    ],
    ids=["dtype", "shape", "rows", "name", "none", "output"],
)
def test_requests_that_triton_refuses(
    inputs: dict[str, Any], output: str, message: str, protocol: str, serving: Serving
) -> None:
    """Triton names the fault, the request reaches no model, and the next good one is answered."""
    with pytest.raises(InferenceServerException) as refusal:
        serving.infer(protocol, "function", inputs, [output])
    assert message in refusal.value.message()
    result = serving.infer(protocol, "function", _X, ["y"])
    np.testing.assert_array_equal(result.as_numpy("y"), 2 * _X["x"])
