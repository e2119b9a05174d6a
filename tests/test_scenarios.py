"""Run the table of scenarios through the adapter, against the fake of Triton's utilities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compatibility
import fake_triton
import hooked
import kinds
import numpy as np
import pytest
import registered
import scenarios
import torch
from scenarios import Call, Refused, Scenario, assert_close

from torch_py_backend.adapter import TritonPythonModel

_STATUS = {
    fake_triton.TritonError.INTERNAL: 500,
    fake_triton.TritonError.INVALID_ARG: 400,
    fake_triton.TritonError.UNAVAILABLE: 503,
}


_TABLE = scenarios.TABLE + kinds.TABLE + hooked.TABLE + registered.TABLE
_OLD, _NEW = fake_triton.GENERATIONS
# The newer utilities share most code paths: one scenario of each kind is enough. What they do not
# touch takes seconds.
_SLOW = {"compiled", "complete_export_nested", "complete_aoti", "complete_torchscript"}
_NEWER = {*compatibility.SCENARIOS} - _SLOW
_ROWS = [(scenario, _OLD) for scenario in _TABLE]
_ROWS += [(scenario, _NEW) for scenario in _TABLE if scenario.name in _NEWER]


@pytest.mark.parametrize(
    ("scenario", "generation"), _ROWS, ids=[f"{row.name}-{release}" for row, release in _ROWS]
)
def test_scenario(
    scenario: Scenario,
    generation: str,
    tmp_path: Path,
    process: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each scenario behaves as the table says, with the oldest and the newest utilities.

    Requests have the same answers alone, in a batch, and beside one that cannot be read.
    """
    fake_triton.become(generation, monkeypatch)
    model = TritonPythonModel()
    arguments = fake_triton.arguments(scenario.lay_out(tmp_path))
    if scenario.load_error:
        with pytest.raises(fake_triton.TritonModelException) as refusal:
            model.initialize(fake_triton.completed(model, arguments))
        for part in scenario.load_error:
            assert part in str(refusal.value)
        return
    arguments = fake_triton.completed(model, arguments)
    model.initialize(arguments)
    document = json.loads(arguments["model_config"])
    for call in scenario.calls:
        (response,) = model.execute([_request(call, document)])
        _check(call, response)
    good = [call for call in scenario.calls if isinstance(call.expected, dict)]
    for turn in _turns(good):
        together = model.execute([_request(call, document) for call in turn])
        for call, response in zip(turn, together, strict=True):
            _check(call, response)
    if not any(call.turn for call in scenario.calls):
        unreadable = fake_triton.InferenceRequest([_Unreadable("x", np.zeros((1, 1)))])
        *beside, refused = model.execute([*[_request(call, document) for call in good], unreadable])
        for call, response in zip(good, beside, strict=True):
            _check(call, response)
        assert refused.error().code() == fake_triton.TritonError.INVALID_ARG
    for batch in scenario.batches:
        sent = [
            _request(call, document, f"{scenario.name}-{place}") for place, call in enumerate(batch)
        ]
        responses = model.execute(sent)
        for call, response in zip(batch, responses, strict=True):
            _check(call, response)
    log = "\n".join(text for _, text in fake_triton.Logger.lines)
    for part in scenario.logs:
        assert part in log


def _turns(calls: Sequence[Call]) -> list[list[Call]]:
    """Return calls in batches: Triton sends no step before the one before it is answered."""
    turns: list[list[Call]] = [[]]
    for call in calls:
        names = [other.turn.id for other in turns[-1] if other.turn is not None]
        if call.turn is not None and call.turn.id in names:
            turns.append([])
        turns[-1].append(call)
    return turns


class _Unreadable(fake_triton.Tensor):
    """A tensor whose bytes do not match its type."""

    def as_numpy(self) -> Any:
        raise ValueError("the bytes do not match")


def _request(call: Call, document: dict[str, Any], request_id: str = "") -> Any:
    turn = call.turn or fake_triton.Turn(0)
    return fake_triton.request(call.inputs, document, request_id, turn, call.parameters)


def _check(call: Call, response: Any) -> None:
    error = response.error()
    if isinstance(call.expected, Refused):
        assert error is not None
        assert _STATUS[error.code()] == call.expected.status
        assert all(part in error.message() for part in call.expected.says), error.message()
        assert not any(part in error.message() for part in call.expected.hides), error.message()
        return
    assert error is None, error.message()
    tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
    for name, expected in call.expected.items():
        if isinstance(expected, torch.Tensor):
            assert torch.equal(torch.utils.dlpack.from_dlpack(tensors[name].to_dlpack()), expected)
        else:
            array = tensors[name].as_numpy()
            assert array.dtype == expected.dtype
            assert array.size == expected.size
            assert_close(array.reshape(expected.shape), expected)  # as Triton reshapes outputs
