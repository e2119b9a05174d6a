"""The table of scenarios on a real tritonserver, over HTTP and gRPC."""

from __future__ import annotations

import numpy as np
import pytest
import scenarios
from scenarios import Call, Refused, Scenario
from serving import Serving, to_numpy
from tritonclient.utils import InferenceServerException

_LOADED = [one for one in scenarios.TABLE if not one.load_error]
_REFUSED = [one for one in scenarios.TABLE if one.load_error]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("scenario", _LOADED, ids=lambda one: one.name)
def test_answers(scenario: Scenario, protocol: str, serving: Serving) -> None:
    """What the table says happens, through a server and a client."""
    state = serving.states[scenario.name]
    assert state.ready, state.reason
    for call in scenario.calls:
        _check(serving, protocol, scenario.name, call)
    for part in scenario.logs:
        assert part in serving.log


@pytest.mark.parametrize("scenario", _REFUSED, ids=lambda one: one.name)
def test_refusals(scenario: Scenario, serving: Serving) -> None:
    """A model that cannot be served says why, while the others are served."""
    state = serving.states[scenario.name]
    assert not state.ready
    for part in scenario.load_error:
        assert part in state.reason


def _check(serving: Serving, protocol: str, name: str, call: Call) -> None:
    if isinstance(call.expected, Refused):
        with pytest.raises(InferenceServerException) as refusal:
            serving.infer(protocol, name, call.inputs, [])
        message = refusal.value.message()
        assert all(part in message for part in call.expected.says), message
        assert not any(part in message for part in call.expected.hides), message
        assert str(call.expected.status) in refusal.value.status() or protocol == "grpc"
        return
    result = serving.infer(protocol, name, call.inputs, list(call.expected))
    for output, expected in call.expected.items():
        came = result.as_numpy(output)
        expected = to_numpy(expected)  # noqa: PLW2901
        assert came.dtype == expected.dtype
        assert came.shape == expected.shape
        if came.dtype.kind == "V":  # numpy cannot compare BF16 with a tolerance
            came, expected = came.astype(np.float32), expected.astype(np.float32)  # noqa: PLW2901
        np.testing.assert_allclose(came, expected, rtol=1e-5, atol=1e-6)
