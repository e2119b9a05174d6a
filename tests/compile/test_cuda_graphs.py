"""CUDA graphs of the warm-up, with a substitute for captures; tests/gpu captures real ones."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import build
import fake_gpu
import numpy as np
import pytest
import torch
from torch import Tensor

from torch_py_backend.batching.counters import Counts
from torch_py_backend.compile import cuda_graphs
from torch_py_backend.compile.cuda_graphs import Graphs


@dataclass
class Captured:
    """The captures of a substitute, and the replays of each.

    Attributes:
        shapes: of the first input of each capture.
        pools: the memory that each capture was given.
        error: added to the values of each replay.
    """

    shapes: list[list[int]] = field(default_factory=list)
    pools: list[object] = field(default_factory=list)
    replays: int = 0
    error: float = 0.0

    def capture(
        self, call: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor], pool: object
    ) -> cuda_graphs.Replay:
        if tensors[0].shape[0] == 7:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.shapes.append(list(tensors[0].shape))
        self.pools.append(pool)

        def replay(tensors: Sequence[Tensor]) -> Any:
            self.replays += 1
            result = call(tensors)
            return result + self.error if self.error else result

        return replay


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Captured:
    captured = Captured()
    monkeypatch.setattr(cuda_graphs, "capture", captured.capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return captured


def add(x: Tensor, *, offset: Tensor | None = None, times: int = 1) -> Tensor:
    return x * times if offset is None else x * times + offset


def test_each_shape_is_captured_once(captured: Captured) -> None:
    """The first call of a shape is captured, and the next ones are replayed with their values."""
    graphs = Graphs(build.MODEL, add, Counts())
    first = [graphs(torch.ones(rows, 2)).sum().item() for rows in (4, 2)]
    assert captured.shapes == [[4, 2], [2, 2]]
    assert captured.replays == 2  # each was compared once
    again = [graphs(torch.full((rows, 2), 3.0)).sum().item() for rows in (4, 2)]
    assert first == [8, 4]
    assert again == [24, 12]
    assert captured.replays == 4
    assert len(captured.shapes) == 2
    assert len({*captured.pools}) == 1


@pytest.mark.parametrize(
    "keywords",
    [{"offset": torch.ones(2, 2)}, {"times": 2}, {"times": True}],
    ids=["another argument", "another number", "a number of another type"],
)
def test_graph_keys(captured: Captured, keywords: dict[str, Any]) -> None:
    """A graph is replayed only for the same structure and the same numbers."""
    graphs = Graphs(build.MODEL, add, Counts())
    x = torch.ones(2, 2)
    graphs(x)
    for _ in range(2):
        assert torch.equal(graphs(x, **keywords), add(x, **keywords))
    assert len(captured.shapes) == 2
    assert captured.replays == 3


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        (7, 0.0, "RuntimeError: operation not permitted when stream is capturing"),
        (2, 0.5, "AssertionError: Tensor-likes are not close"),
        (2, float("nan"), "AssertionError: Tensor-likes are not close"),
    ],
    ids=["not captured", "other values", "not a number"],
)
def test_eager_where_a_graph_is_wrong(
    rows: int, error: float, says: str, captured: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be captured, or is wrong when replayed, is called eagerly, with one warning."""
    captured.error = error
    graphs = Graphs(build.MODEL, add, Counts())
    x = torch.ones(rows, 2)
    for _ in range(2):
        assert torch.equal(graphs(x), x)
    assert f"inputs of [[{rows}, 2]] are called without a CUDA graph: {says}" in caplog.text
    assert len(caplog.records) == 1
    captured.error = 0.0
    graphs(torch.ones(3, 2))
    replays = captured.replays
    graphs(torch.ones(3, 2))
    assert captured.replays == replays + 1
    assert len({*captured.pools}) == len(captured.pools)  # that of a failed capture stays in use


@dataclass
class Recorded:
    """A substitute for torch's captures, which fail for some calls.

    Attributes:
        pools: the pool of each capture; None: its own.
        generator_captures: whether the generator takes part in a capture, as in torch 2.11.
    """

    pools: list[object] = field(default_factory=list)
    generator_captures: bool = False

    @contextlib.contextmanager
    def graph(self, _: object, *, pool: object = None, stream: object) -> Iterator[None]:
        self.pools.append(pool)
        self.generator_captures = True
        try:
            yield
        except ValueError as error:
            raise RuntimeError("the capture ends with an error") from error
        self.generator_captures = False


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    fake_gpu.install(monkeypatch)
    zeros = torch.zeros
    for name, value in {
        "graph": recorded.graph,
        "graph_pool_handle": object,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    return recorded


@dataclass
class Failing:
    """Doubles its input; one call of a row count fails."""

    calls: dict[int, int] = field(default_factory=dict)
    fails: dict[int, int] = field(default_factory=dict)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        self.calls[rows] = self.calls.get(rows, 0) + 1
        if self.fails.get(rows) == self.calls[rows]:
            raise ValueError(f"no {rows} rows")
        return x * 2


# The calls of a new shape: eager, two to warm up, one without synchronization, the capture.
_UNSYNCHRONIZED, _CAPTURE = 4, 5


@pytest.mark.parametrize(
    ("call", "shares"), [(_CAPTURE, False), (_UNSYNCHRONIZED, True)], ids=["capture", "before it"]
)
def test_a_failed_capture(
    call: int, shares: bool, recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves its pool and resets the generator; a refusal before it does neither."""
    graphs = Graphs(build.MODEL, Failing(fails={3: call}), Counts())
    for rows in (2, 3, 4):
        assert torch.equal(graphs(torch.ones(rows, 2)), torch.full((rows, 2), 2.0))
    (record,) = caplog.records
    assert "without a CUDA graph: ValueError: no 3 rows" in record.getMessage()
    assert not recorded.generator_captures
    first, *_, last = recorded.pools
    assert (first == last) == shares
    assert (None in recorded.pools) == (not shares)  # the capture that resets the generator


@dataclass
class Opaque:
    """A result whose tensors torch does not find."""

    y: Tensor


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (Opaque, "the result holds Opaque objects"),
        (lambda x: (x, Opaque(x)), "the result holds Opaque objects"),
        (lambda _: {"y": 1.0}, "the result has no tensors"),
    ],
    ids=["alone", "beside a tensor", "a number"],
)
def test_results_that_torch_does_not_copy(
    result: Callable[[Tensor], Any],
    says: str,
    captured: Captured,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A graph of a result that is neither compared nor copied is not made."""
    graphs = Graphs(build.MODEL, result, Counts())
    for _ in range(2):
        graphs(torch.ones(2, 2))
    assert not captured.shapes
    (record,) = caplog.records
    assert f"without a CUDA graph: TypeError: {says}" in record.getMessage()


def test_arguments_without_a_hash(captured: Captured, caplog: pytest.LogCaptureFixture) -> None:
    """They are called eagerly, with one warning."""
    counts = Counts()
    graphs = Graphs(build.MODEL, lambda x, texts: x * len(texts), counts)
    texts, x = np.array([b"a", b"b"], dtype=np.object_), torch.ones(2, 2)
    for _ in range(2):
        assert torch.equal(graphs(x, texts), x * 2)
    sealed = graphs.seal(lambda x, texts: x * 3)
    assert torch.equal(sealed(x, texts), x * 3)
    assert counts.eager_calls == 1
    assert not captured.shapes
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "unhashable type: 'numpy.ndarray'" in record.getMessage()


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(0, 2),
        torch.tensor([[float("nan"), float("inf")], [1.0, -float("inf")]]),
        torch.tensor([[1, 2]]),
        torch.tensor([[True, False]]),
    ],
    ids=["no rows", "not finite", "integers", "booleans"],
)
def test_equal_values(x: Tensor, captured: Captured, caplog: pytest.LogCaptureFixture) -> None:
    """Results of any type and value can be compared."""
    graphs = Graphs(build.MODEL, lambda x: x.clone(), Counts())
    graphs(x)
    graphs(x)
    assert captured.replays == 2
    assert not caplog.records


def test_rounding_is_no_difference(captured: Captured) -> None:
    """A replay may differ by the rounding of another kernel."""
    captured.error = 1e-3
    graphs = Graphs(build.MODEL, add, Counts())
    graphs(torch.ones(2, 2))
    graphs(torch.ones(2, 2))
    assert captured.replays == 2


@pytest.mark.parametrize("other", [torch.ones(3, 2), torch.ones(2, 2, dtype=torch.float64)])
def test_sealed_model_captures_nothing(captured: Captured, other: Tensor) -> None:
    """After the warm-up other shapes and dtypes are called without a graph."""
    counts = Counts()
    graphs = Graphs(build.MODEL, add, counts)
    graphs(torch.ones(2, 2))
    sealed = graphs.seal(lambda x: x + 10)
    for _ in range(2):
        assert torch.equal(sealed(other), other + 10)
    assert torch.equal(sealed(torch.ones(2, 2)), torch.ones(2, 2))
    assert len(captured.shapes) == 1
    assert captured.replays == 2
    assert counts.eager_calls == 2
