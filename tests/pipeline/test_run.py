"""The pipeline: calls of the model, their arguments, and the outcome of each item."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, cast

import build
import pytest
import torch
from engines import engine
from torch import Tensor

from torch_py_backend.errors import ForwardError, OutputError
from torch_py_backend.pipeline import run
from torch_py_backend.pipeline.run import Counts
from torch_py_backend.values import Rows

FREE = build.spec("x", dims=(-1,))


def items(*shapes: tuple[int, ...]) -> list[Any]:
    return [{"x": torch.rand(shape)} for shape in shapes]


def test_one_item_is_not_copied() -> None:
    """A single item's memory is passed in and out without a copy, except in the very first call."""
    calls: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        calls.append(x)
        return x

    model, (item,) = engine(forward), items((2, 4))
    model.run([item])
    (outcome,) = model.run([item])
    y = cast("dict[str, Tensor]", outcome)["y"]
    assert calls[1].data_ptr() == item["x"].data_ptr() == y.data_ptr()


def test_outputs_of_a_single_call_are_not_copied() -> None:
    """A run of one call copies no outputs, whatever memory they share."""
    memory = torch.zeros(8, 4)
    outcomes = engine(lambda x: memory[: x.shape[0]]).run(items((1, 4), (2, 4)))
    (first, second) = (cast("dict[str, Tensor]", outcome)["y"] for outcome in outcomes)
    assert first.data_ptr() == memory.data_ptr()
    assert second.data_ptr() == memory[1].data_ptr()


@pytest.mark.parametrize("mode", [True, False])
def test_inference_mode(mode: bool) -> None:
    """The model runs without gradients; in inference mode unless the config disables it."""
    modes = []

    def forward(x: Tensor) -> Tensor:
        modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return x

    engine(forward, inference_mode=mode).run(items((1, 4)))
    assert modes == [(mode, False)]


def test_padded_inputs_whose_shape_forward_changes() -> None:
    """Outputs are cut to the lengths that requests sent, also if forward() reshapes its inputs."""
    served = engine(lambda x: 2 * x.unsqueeze_(1).squeeze(1), pad={"x": {"outputs": ["y"]}})
    for lengths in ([2, 4], [3]):
        sent: list[Any] = [{"x": torch.ones(1, length)} for length in lengths]
        outcomes: list[Any] = list(served.run(sent))
        assert [outcome["y"].tolist() for outcome in outcomes] == [[[2.0] * n] for n in lengths]


def test_a_later_result_of_another_structure() -> None:
    """A result with another structure is an error of its batch only."""
    results: list[Any] = [{"y": torch.ones(1, 4)}, torch.ones(1, 4), {"z": torch.ones(1, 4)}]
    model = engine(lambda x: results.pop(0))
    outcomes = [model.run(items((1, 4)))[0] for _ in range(3)]
    assert isinstance(outcomes[0], dict)
    for outcome in outcomes[1:]:
        assert isinstance(outcome, OutputError)
        assert "unlike its first result" in str(outcome)


class Scratch:
    """Doubles into a buffer that the next call reuses; counts its calls."""

    def __init__(self, fails: Callable[[Tensor], None] = lambda x: None) -> None:
        self.calls = 0
        self._fails = fails
        self._memory = torch.zeros(4096)

    def __call__(self, x: Tensor, n: int = 1, by: Tensor | None = None) -> Tensor:
        self.calls += 1
        result = self._memory[: x.numel()].view(x.shape)
        result.copy_(x * 2 * n if by is None else x * 2 * n + by)
        self._fails(x)
        return result


def fails_on_two(x: Tensor) -> None:
    if bool((x == 2).any()):
        raise ValueError("the value 2")


def fails_above_two_rows(x: Tensor) -> None:
    if x.shape[0] > 2:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def _row(*values: float, **others: Tensor) -> dict[str, Tensor]:
    return {"x": torch.tensor([values]), **others}


SENT = [_row(1.0), _row(2.0), _row(3.0), _row(4.0), _row(5.0)]


@pytest.mark.parametrize(
    ("model", "sent", "expected", "overrides"),
    [
        pytest.param(
            Scratch(), [_row(1.0), _row(10.0, 10.0), _row(3.0)], [2, 20, 6], {}, id="shapes"
        ),
        pytest.param(
            Scratch(fails_on_two),
            [_row(1.0), _row(2.0, 2.0), _row(3.0)],
            [2, ForwardError, 6],
            {},
            id="shapes, one fails",
        ),
        pytest.param(Scratch(), SENT, [2, 4, 6, 8, 10], {"batch_buckets": (2,)}, id="buckets"),
        pytest.param(
            Scratch(),
            [_row(1.0, n=torch.full((1, 1), n)) for n in (1, 2, 1)],
            [2, 4, 2],
            {"inputs": (FREE, build.spec("n", "INT64", (1,)))},
            id="scalars",
        ),
        pytest.param(
            Scratch(),
            [_row(1.0), _row(2.0, by=torch.ones(1, 1)), _row(3.0)],
            [2, 5, 6],
            {"inputs": (FREE, dataclasses.replace(build.spec("by", dims=(-1,)), optional=True))},
            id="optional inputs",
        ),
        pytest.param(Scratch(fails_on_two), SENT, [2, ForwardError, 6, 8, 10], {}, id="bisection"),
        pytest.param(Scratch(fails_above_two_rows), SENT, [2, 4, 6, 8, 10], {}, id="out of memory"),
        pytest.param(
            Scratch(),
            [{"x": torch.tensor([value])} for value in (1.0, 2.0, 3.0)],
            [2, 4, 6],
            {"max_batch_size": 0},
            id="without a batch dimension",
        ),
    ],
)
def test_outputs_in_reused_memory(
    model: Scratch, sent: list[Any], expected: list[Any], overrides: dict[str, Any]
) -> None:
    """Each request keeps its own outputs when one run calls the model several times."""
    outcomes = engine(model, **overrides).run(sent)
    assert model.calls > 1
    assert [
        outcome["y"].flatten()[0].item() if isinstance(outcome, dict) else type(outcome)
        for outcome in outcomes
    ] == expected


def test_seconds_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of each stage of a batch is counted for that stage."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def taking(seconds: float, value: Callable[..., Any]) -> Callable[..., Any]:
        def stage(*args: Any) -> Any:
            now[0] += seconds
            return value(*args)

        return stage

    stages = run.Stages(
        before=(),
        group=lambda entries: (entries, ()),
        send=taking(2, lambda columns: columns),
        extract=taking(8, lambda result, _: [result]),
        fill=None,
        copy=lambda value: value,
        fetch=taking(16, lambda values: values),
        scatter=lambda values, sizes, _: list(torch.as_tensor(values[0]).split(list(sizes))),
        after=(),
    )
    counts = Counts()
    gather = taking(1, lambda items: ([torch.cat(items)], [len(item) for item in items]))
    items: list[Any] = [torch.ones(2), torch.ones(1)]
    group = run.Group(gather, taking(4, torch.neg), items, (0, 1))
    results = run.attempt(stages, counts)(group, False)
    assert [result.tolist() for result in results] == [[-1, -1], [-1]]
    assert counts == Counts(
        rows=3,
        gather_seconds=1,
        host_to_device_seconds=2,
        forward_seconds=12,
        device_to_host_seconds=16,
    )


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

    model = engine(double, rows, max_batch_size=16)
    x = torch.rand(sent, 4)
    (outcome,) = model.run([{"x": x}])
    assert rows_called == calls
    assert isinstance(outcome, dict)
    assert torch.equal(torch.as_tensor(outcome["y"]), x * 2)
    assert model.counts.rows == sum(calls)
    assert model.counts.filled_rows == sum(calls) - sent
