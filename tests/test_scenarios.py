"""Run the tables of scenarios through the adapter, against the fake of Triton's utilities."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_triton
import instances
import kinds
import pytest
import registered
import scenarios
import streamed
import torch
from scenarios import Call, Refused, Scenario, assert_close

from torch_py_backend.adapter import TritonPythonModel

_TABLE = scenarios.TABLE + kinds.TABLE + registered.TABLE + streamed.REFUSED
# On a server only: what takes inductor's time, or ends a process, is run here by the tests of
# engine/test_compilation.py, of loading/test_aotinductor.py, and of processes/.
_ON_SERVER = ("compiled", "complete_aoti", "complete_crashes")
# `make aoti` adds this value of OPTIMIZE to each model. One that it does not suit is skipped, but
# never the module of this row.
_OPTIMIZE = os.environ.get("SCENARIO_OPTIMIZE", "")
_SUITED = "factory"
_ROWS = [scenario for scenario in _TABLE if scenario.name not in _ON_SERVER]
# Its bytes do not match its type.
_UNREADABLE = Call({}, Refused(400, ()))


@pytest.mark.parametrize("scenario", _ROWS, ids=lambda row: row.name)
def test_scenario(scenario: Scenario, tmp_path: Path, here: None) -> None:
    """Requests have the same answers alone, in a batch, and beside one that cannot be read."""
    model = TritonPythonModel()
    folder = scenario.lay_out(tmp_path)
    if _OPTIMIZE:
        config = scenario.config + scenarios.option("OPTIMIZE", _OPTIMIZE)
        (folder / "config.pbtxt").write_text(config)
    arguments = fake_triton.arguments(folder)
    try:
        arguments = fake_triton.completed(model, arguments)
        model.initialize(arguments)
    except fake_triton.TritonModelException as refusal:
        if _OPTIMIZE and "OPTIMIZE" in str(refusal) and scenario.name != _SUITED:
            pytest.skip(str(refusal))
        if not scenario.load_error or any(one not in str(refusal) for one in scenario.load_error):
            raise
        return
    assert not scenario.load_error
    document = json.loads(arguments["model_config"])
    for batch in _batches(scenario):
        requests = [
            _request(call, document, f"{scenario.name}-{place}") for place, call in enumerate(batch)
        ]
        for call, response in zip(batch, model.execute(requests), strict=True):
            _check(call, response)
    log = "\n".join(text for _, text in fake_triton.Logger.lines)
    for part in scenario.logs:
        assert part in log


def _batches(scenario: Scenario) -> list[Sequence[Call]]:
    good = [call for call in scenario.calls if isinstance(call.expected, dict)]
    batches = [*([call] for call in scenario.calls), *_turns(good)]
    if not any(call.turn for call in scenario.calls):
        batches.append([*good, _UNREADABLE])
    return [*batches, *scenario.batches]


def _turns(calls: Sequence[Call]) -> list[list[Call]]:
    """Return calls in batches: Triton sends no step before the one before it is answered."""
    turns: list[list[Call]] = [[]]
    for call in calls:
        names = [other.turn.id for other in turns[-1] if other.turn is not None]
        if call.turn is not None and call.turn.id in names:
            turns.append([])
        turns[-1].append(call)
    return turns


def _request(call: Call, document: dict[str, Any], request_id: str) -> Any:
    if call is _UNREADABLE:
        return instances.unreadable(request_id=request_id)
    turn = call.turn or fake_triton.Turn(0)
    return fake_triton.request(call.inputs, document, request_id, turn, call.parameters)


def _value(tensor: Any) -> Any:
    try:
        return tensor.as_numpy()
    except fake_triton.TritonModelException:
        return torch.utils.dlpack.from_dlpack(tensor.to_dlpack())


def _check(call: Call, response: Any) -> None:
    error = response.error()
    if isinstance(call.expected, Refused):
        instances.check_refusal(error, call.expected)
        return
    assert error is None, error.message()
    values = {tensor.name(): _value(tensor) for tensor in response.output_tensors()}
    for name, expected in call.expected.items():
        value = values[name]
        assert value.dtype == expected.dtype
        if isinstance(expected, torch.Tensor):
            assert torch.equal(value, expected)
        else:
            assert value.size == expected.size
            assert_close(value.reshape(expected.shape), expected)  # as Triton reshapes outputs
