"""The first and last call of a stream."""

from __future__ import annotations

import dataclasses
from typing import Any

import fake_gpu
import pytest
import streamed
import torch
from torch import Tensor

from torch_py_backend.config.options import Options
from torch_py_backend.engine import build, runtime
from torch_py_backend.engine.runtime import Runtime
from torch_py_backend.engine.stream_calls import StreamCalls
from torch_py_backend.errors import BackendError, InputError, OutputError
from torch_py_backend.values import Item

CPU = torch.device("cpu")


def double(x: Tensor) -> Tensor:
    return x * 2


def test_begin_returns_the_result_unchanged() -> None:
    """begin() does not inspect the result."""
    kept = object()
    engine = streamed.engine(lambda x: (kept, x))
    item: Item = {"x": torch.rand(3, 2)}
    (result, x), inputs = engine.stream_calls.begin(item)
    assert result is kept
    assert x is item["x"]
    assert inputs.rows == 3


def test_begin_refuses_an_invalid_item() -> None:
    """An invalid item is refused before the model is called."""
    engine = streamed.engine(double)
    with pytest.raises(InputError, match="lacks the input 'x'"):
        engine.stream_calls.begin({})


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        pytest.param(torch.ones(1, 2).double(), OutputError, id="another type"),
        pytest.param(torch.full((1, 2), torch.nan), BackendError, id="no number"),
    ],
)
def test_an_invalid_result_fails_alone(wrong: Any, kind: type[BackendError]) -> None:
    """Of several results, one that contradicts the config does not affect the others."""
    engine = streamed.engine(double, check_finite=True)
    begun = [engine.stream_calls.begin(streamed.item(value, value)) for value in (1, 2, 3)]
    (first, inputs), _, (third, _) = begun
    outcomes = engine.stream_calls.outcomes([(first, inputs), (wrong, inputs), (third, inputs)])
    assert isinstance(outcomes[1], kind)
    values = [
        torch.as_tensor(outcome["y"]).tolist() for outcome in outcomes if isinstance(outcome, dict)
    ]
    assert values == [[[2.0, 2.0]], [[6.0, 6.0]]]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_outputs_go_to_where_the_request_was(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of a stream stay on the GPU only if the request's inputs were there."""
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(
        Runtime, "to_device", lambda _, columns: [fake_gpu.put(column) for column in columns]
    )
    engine = streamed.engine(double)
    engine.runtime = dataclasses.replace(
        runtime.create(Options(), CPU, ()), device=fake_gpu.DEVICE, host_inputs=False
    )
    calls = StreamCalls(engine, build.chosen(engine, double))
    item = streamed.item(1, 2)
    if on_gpu:
        item = {name: fake_gpu.put(torch.as_tensor(value)) for name, value in item.items()}
    result, inputs = calls.begin(item)
    (outcome,) = calls.outcomes([(fake_gpu.put(result), inputs)])
    assert isinstance(outcome, dict)
    assert isinstance(outcome["y"], Tensor)
    assert outcome["y"].is_cuda == on_gpu
    assert torch.as_tensor(outcome["y"]).tolist() == [[2.0, 4.0]]
