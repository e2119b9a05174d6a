"""CUDA graphs of the warm-up, with a substitute for captures; tests/gpu captures real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import build
import pytest
import torch
from torch import Tensor

from torch_py_backend.batching.counters import Counts
from torch_py_backend.compile import cuda_graphs
from torch_py_backend.compile.cuda_graphs import Graphs


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Captured shapes; the substitute's replay negates the result."""
    shapes: list[list[int]] = []

    def capture(
        call: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]
    ) -> cuda_graphs.Replay:
        shapes.append(list(tensors[0].shape))
        return lambda tensors: -call(tensors)

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    yield shapes
    assert all(shapes)


def add(x: Tensor, *, offset: Tensor | None = None, times: int = 1) -> Tensor:
    return x * times if offset is None else x * times + offset


def test_each_shape_is_captured_once(captured: list[list[int]]) -> None:
    """The first call of a shape is captured, and the next ones are replayed with their values."""
    graphs = Graphs(build.MODEL, add, Counts())
    first = [graphs(torch.ones(rows, 2)).sum().item() for rows in (4, 2)]
    again = [graphs(torch.full((rows, 2), 3.0)).sum().item() for rows in (4, 2)]
    assert captured == [[4, 2], [2, 2]]
    assert first == [8, 4]
    assert again == [-24, -12]


@pytest.mark.parametrize(
    "keywords",
    [{"offset": torch.ones(2, 2)}, {"times": 2}, {"times": True}],
    ids=["another argument", "another number", "a number of another type"],
)
def test_graph_keys(captured: list[list[int]], keywords: dict[str, Any]) -> None:
    """A graph is replayed only for the same structure and the same numbers."""
    graphs = Graphs(build.MODEL, add, Counts())
    x = torch.ones(2, 2)
    graphs(x)
    assert torch.equal(graphs(x, **keywords), add(x, **keywords))
    assert torch.equal(graphs(x, **keywords), -add(x, **keywords))
    assert len(captured) == 2


@pytest.mark.parametrize("other", [torch.ones(3, 2), torch.ones(2, 2, dtype=torch.float64)])
def test_sealed_model_captures_nothing(captured: list[list[int]], other: Tensor) -> None:
    """After the warm-up other shapes and dtypes are called without a graph."""
    counts = Counts()
    graphs = Graphs(build.MODEL, add, counts)
    graphs(torch.ones(2, 2))
    sealed = graphs.seal(lambda x: x + 10)
    for _ in range(2):
        assert torch.equal(sealed(other), other + 10)
    assert torch.equal(sealed(torch.ones(2, 2)), -torch.ones(2, 2))
    assert len(captured) == 1
    assert counts.eager_calls == 2
