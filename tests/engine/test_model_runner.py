"""The model's calls for a batch: their number, their rows, and the sealed model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import build
import pytest
import torch
from torch import Tensor

from torch_py_backend.batching.counters import Counts
from torch_py_backend.batching.gather_scatter import ANY_ROWS, Rows, clone
from torch_py_backend.batching.grouping import Group, Grouping
from torch_py_backend.batching.output_extraction import OutputExtractor
from torch_py_backend.engine.model_runner import ModelRunner
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature import introspection


def create_runner(
    function: Callable[..., Any], rows: Rows = ANY_ROWS, **overrides: Any
) -> tuple[ModelRunner, Counts, Grouping]:
    """Return a model runner for a function of `x`."""
    settings = build.config(**overrides)
    loaded = Loaded(build.artifact(), function, introspection.from_function(function), rows=rows)
    grouping, counts = Grouping(settings, loaded.signature), Counts()
    return (
        ModelRunner(settings, loaded, grouping, OutputExtractor(settings).extract, counts, clone),
        counts,
        grouping,
    )


def grouped(grouping: Grouping, x: Tensor) -> Group:
    (group,) = grouping.group([(0, {"x": x})])
    return group


@pytest.mark.parametrize(
    ("rows", "sent", "calls"),
    [
        pytest.param(Rows(4, 4), 9, [4, 4, 4], id="fixed, in pieces"),
        pytest.param(Rows(2, None), 1, [2], id="at least two"),
        pytest.param(Rows(2, 3), 7, [3, 3, 2], id="in pieces, the last filled up"),
    ],
)
def test_rows_that_a_program_takes(rows: Rows, sent: int, calls: list[int]) -> None:
    """A batch is as many calls as needed; rows that fill a call are counted and dropped."""
    rows_called: list[int] = []

    def double(x: Tensor) -> Tensor:
        rows_called.append(x.shape[0])
        return x * 2

    runner, counts, grouping = create_runner(double, rows)
    x = torch.rand(sent, 4)
    (y,) = runner.call(grouped(grouping, x).inputs, [x], sent)
    assert rows_called == calls
    assert torch.equal(torch.as_tensor(y), x * 2)
    assert counts.rows == sum(calls) - sent
    assert counts.filled_rows == sum(calls) - sent


def test_an_eager_model_is_sealed_unchanged() -> None:
    """Without compilation the sealed model is the same function, and nothing is counted."""

    def forward(x: Tensor) -> Tensor:
        return x

    runner, counts, _ = create_runner(forward)
    with runner.preparing():
        pass
    assert runner.forward is forward
    assert not runner.compiles
    assert counts == Counts()
