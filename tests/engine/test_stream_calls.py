"""The first and last stages of a stream."""

from __future__ import annotations

from typing import Any

import pytest
import streamed
import torch
from torch import Tensor

from torch_py_backend.batching.gather_scatter import Item
from torch_py_backend.errors import BackendError, InputError, OutputError


def double(x: Tensor) -> Tensor:
    return x * 2


def test_begin_returns_the_result_unchanged() -> None:
    """begin() does not inspect the result, and counts a batch of its rows."""
    kept = object()
    engine = streamed.engine(lambda x: (kept, x))
    item: Item = {"x": torch.rand(3, 2)}
    (result, x), inputs = engine.stream_calls.begin(item)
    assert result is kept
    assert x is item["x"]
    assert inputs.rows == 3
    assert engine.counts.batches == {3: 1}


def test_begin_refuses_an_invalid_item() -> None:
    """An invalid item is refused before the model is called."""
    engine = streamed.engine(double)
    with pytest.raises(InputError, match="lacks the input 'x'"):
        engine.stream_calls.begin({})
    assert engine.counts.batches == {}


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
