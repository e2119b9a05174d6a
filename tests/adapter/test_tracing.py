"""Triton's trace contexts in the model's code, without a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import fake_triton
import numpy as np
import pytest
import traced
from fake_triton import InferenceTrace, Turn
from instances import Served

# The traces of two requests: the IDs of the trace and of Triton's span in it.
_FIRST, _SECOND = ("11" * 16, "22" * 8), ("33" * 16, "44" * 8)
_NONE = [0, 0]
_ALONE = Turn(0)

pytestmark = pytest.mark.usefixtures("process")


class _Served(Served):
    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, traced.TABLE[name])

    def traced(self, *ids: str, value: float = 1.0, turn: Turn = _ALONE) -> Any:
        """Return a request that Triton traces; without IDs, one that it does not."""
        x = np.full((1, 1), value, dtype=np.float32)
        trace = InferenceTrace(traced.context(*ids)) if ids else InferenceTrace()
        return self.request({"x": x}, turn=turn, trace=trace)

    def run(self, *requests: Any) -> list[list[list[int]]]:
        return [list(map(_values, responses)) for responses in self.send(*requests)]


def _values(response: Any) -> list[int]:
    assert response.error() is None, response.error().message()
    (y,) = response.output_tensors()
    values: list[int] = y.as_numpy().ravel().tolist()
    return values


def test_a_batch_has_the_context_of_its_first_traced_request_and_hooks_their_own(
    tmp_path: Path,
) -> None:
    first, second = traced.ends(*_FIRST), traced.ends(*_SECOND)
    for name, expected in (("plain", [first] * 3), ("hooked", [_NONE, first, second])):
        served = _Served(tmp_path / name, name)
        requests = served.traced(), served.traced(*_FIRST), served.traced(*_SECOND)
        assert served.run(*requests) == [[one] for one in expected]
        assert served.run(served.traced(), served.traced()) == [[_NONE]] * 2


@pytest.mark.parametrize(("name", "responses"), [("sums", 1), ("yields", 2), ("steps", 2)])
def test_steps_and_streams_have_the_context_of_their_request(
    name: str, responses: int, tmp_path: Path
) -> None:
    served = _Served(tmp_path, name)
    for ids, turn in ((_FIRST, Turn(7, starts=True)), (_SECOND, Turn(7)), ((), Turn(7, ends=True))):
        expected = traced.ends(*ids) or _NONE
        assert served.run(served.traced(*ids, turn=turn)) == [[expected] * responses]


def test_a_part_of_a_failed_batch_has_the_context_of_its_own_request(tmp_path: Path) -> None:
    served = _Served(tmp_path, "plain")
    bad = served.traced(*_SECOND, value=-1.0)
    refused, good = served.model.execute([bad, served.traced(*_FIRST)])
    assert refused.error() is not None
    assert _values(good) == traced.ends(*_FIRST)


def test_invalid_context(tmp_path: Path) -> None:
    """A request whose trace context is invalid is answered: clients send parts of it."""
    served = _Served(tmp_path, "plain")
    x = fake_triton.Tensor("x", np.ones((1, 1), dtype=np.float32))
    state = {"traceparent": f"00-{_FIRST[0]}-{_FIRST[1]}-01", "tracestate": '=,"\\'}
    for context in map(json.dumps, ({"traceparent": "00-no-01"}, state)):
        served.run(fake_triton.InferenceRequest([x], trace=InferenceTrace(context)))


@pytest.mark.parametrize("lacks", ["opentelemetry-api", "traces"])
def test_without_traces(lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = fake_triton.Tensor("x", np.ones((1, 1), dtype=np.float32))
    asked = mock.Mock()
    if lacks == "traces":
        monkeypatch.delattr(fake_triton.InferenceRequest, "trace")
    else:
        monkeypatch.setitem(sys.modules, "opentelemetry.trace.propagation", None)
        monkeypatch.setattr(fake_triton.InferenceRequest, "trace", asked)
    for name in ("plain", "hooked"):
        served = _Served(tmp_path / name, name)
        assert served.run(fake_triton.InferenceRequest([x])) == [[_NONE]]
    assert not asked.called
