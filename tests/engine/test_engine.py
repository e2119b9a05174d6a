"""The engine: calls of the model, their arguments, and the outcome of each item."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import build
import numpy as np
import pytest
import torch
from torch import Tensor

from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import ANY_ROWS, Rows
from torch_py_backend.config.model_config import TensorSpec
from torch_py_backend.config.options import Options
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import (
    BackendError,
    ForwardError,
    InputError,
    OutputError,
)
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature import introspection
from torch_py_backend.signature.binding import Argument, ArgumentType, Passing, Signature


class Recorder:
    """A function that records its calls."""

    def __init__(self, function: Callable[[Tensor], Any] = lambda x: x) -> None:
        self.calls: list[Tensor] = []
        self._function = function

    def __call__(self, x: Tensor) -> Any:
        self.calls.append(x)
        return self._function(x)


def engine(function: Callable[..., Any], rows: Rows = ANY_ROWS, **overrides: Any) -> Engine:
    """Return an engine with an input `x` and an output `y`, both FP32 [-1] by default."""
    spec = build.spec("x", dims=(-1,))
    settings = build.config(inputs=(spec,), outputs=(build.spec("y", dims=(-1,)),), **overrides)
    argument = Argument("x", True, Passing.POSITIONAL, ArgumentType.TENSOR, "x")
    loaded = Loaded(build.artifact(), function, Signature((argument,)), None, rows)
    surroundings = runtime.create(Options(), torch.device("cpu"), ())
    return Engine(settings, loaded, surroundings, build.artifact())


def items(*shapes: tuple[int, ...]) -> list[Any]:
    return [{"x": torch.rand(shape)} for shape in shapes]


def test_one_item_is_not_copied() -> None:
    """A single item's memory is passed in and out without a copy, except in the very first call."""
    model = Recorder()
    (item,) = items((2, 4))
    served = engine(model)
    served.run([item])
    (outcome,) = served.run([item])
    assert isinstance(outcome, dict)
    made = cast("Tensor", outcome["y"])
    assert model.calls[1].data_ptr() == item["x"].data_ptr() == made.data_ptr()


def test_unbatched_items_are_called_one_by_one() -> None:
    """With max_batch_size 0 each request is a call."""
    model = Recorder()
    outcomes = engine(model, max_batch_size=0).run(items((4,), (4,), (4,)))
    assert [call.shape for call in model.calls] == [(4,)] * 3
    assert all(isinstance(outcome, dict) for outcome in outcomes)


def test_a_failed_group_does_not_affect_others() -> None:
    """An exception for one shape does not affect items of another."""

    def picky(x: Tensor) -> Tensor:
        if x.shape[1] == 5:
            raise ValueError("five")
        return x

    outcomes = engine(picky).run(items((1, 4), (1, 5)))
    assert isinstance(outcomes[0], dict)
    assert isinstance(outcomes[1], BackendError)
    assert "ValueError: five" in str(outcomes[1])


@pytest.mark.parametrize(("mode", "expected"), [(True, True), (False, False)])
def test_inference_mode(mode: bool, expected: bool) -> None:
    """The model runs without gradients; in inference mode unless the config disables it."""
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return x

    made = engine(look)
    made.guard = runtime.create(Options(inference_mode=mode), torch.device("cpu"), ()).guard
    made.run(items((1, 4)))
    assert seen == [(expected, False)]


def test_a_later_result_of_another_structure() -> None:
    """A result with another structure is an error of its batch only."""
    results: list[Any] = [{"y": torch.ones(1, 4)}, torch.ones(1, 4), {"z": torch.ones(1, 4)}]
    made = engine(lambda x: results.pop(0))
    outcomes = [made.run(items((1, 4)))[0] for _ in range(3)]
    assert isinstance(outcomes[0], dict)
    for outcome in outcomes[1:]:
        assert isinstance(outcome, OutputError)
        assert "unlike its first result" in str(outcome)


def whole(
    function: Callable[..., Any],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    **overrides: Any,
) -> Engine:
    """Return an engine for a function as loaded from a source file."""
    settings = build.config(inputs=inputs, outputs=outputs, **overrides)
    loaded = Loaded(build.artifact(), function, introspection.from_function(function))
    surroundings = runtime.create(Options(), torch.device("cpu"), ())
    return Engine(settings, loaded, surroundings, build.artifact())


def texts(*rows: Any) -> Any:
    return np.array(rows, dtype=np.object_)


WORDS = (build.spec("x", "BYTES", (1,)),)
LOUDER = (build.spec("y", "BYTES", (1,)),)


def louder(x: list[str]) -> list[str]:
    return [word + "!" for word in x]


def test_invalid_utf8_fails_alone() -> None:
    """A request with invalid UTF-8 does not affect its batch."""
    wrong, right = whole(louder, WORDS, LOUDER).run([{"x": texts([b"\xff"])}, {"x": texts([b"a"])}])

    assert isinstance(wrong, InputError)
    assert isinstance(right, dict)
    assert right["y"].tolist() == [["a!"]]


def test_different_scalars_are_different_calls() -> None:
    """Items with different scalar arguments do not share a call."""

    def power(x: Tensor, n: int) -> Tensor:
        if n < 0:
            raise ValueError("negative")
        return x**n

    made = whole(power, (build.spec("x"), build.spec("n", "INT64", (1,))), (build.spec("y"),))
    x = torch.full((2, 4), 3.0)

    outcomes = made.run([{"x": x, "n": torch.full((2, 1), n)} for n in (2, -1, 3)])

    assert isinstance(outcomes[1], ForwardError)
    found = [outcome["y"] for outcome in outcomes if isinstance(outcome, dict)]
    assert [value.flatten()[0].item() for value in found] == [9.0, 27.0]


@pytest.mark.parametrize("count", [1, 2])
def test_items_without_any_input(count: int) -> None:
    """A model whose inputs are all optional answers requests without inputs."""

    def constant(x: Tensor | None = None) -> Tensor:
        return torch.ones(4) if x is None else x

    x = dataclasses.replace(build.spec("x"), optional=True)
    made = whole(constant, (x,), (build.spec("y"),), max_batch_size=0)

    outcomes = made.run([{}] * count)

    assert [isinstance(outcome, dict) for outcome in outcomes] == [True] * count


@pytest.mark.parametrize("count", [1, 2])
def test_batch_without_any_input(count: int) -> None:
    """A batched request without any input is refused: its number of rows is unknown."""

    def constant(x: Tensor | None = None) -> Tensor:
        return torch.ones(1, 4) if x is None else x

    x = dataclasses.replace(build.spec("x"), optional=True)
    outcomes = whole(constant, (x,), (build.spec("y"),)).run([{}] * count)

    assert all(isinstance(outcome, InputError) for outcome in outcomes)


class Scratch:
    """Doubles into a buffer that the next call reuses; counts its calls."""

    def __init__(self, *, fails: Callable[[Tensor], None] = lambda x: None) -> None:
        self.calls = 0
        self._fails = fails
        self._memory = torch.zeros(4096)

    def __call__(self, x: Tensor, n: int = 1, by: Tensor | None = None) -> Tensor:
        self.calls += 1
        made = self._memory[: x.numel()].view(x.shape)
        made.copy_(x * 2 * n if by is None else x * 2 * n + by)
        self._fails(x)
        return made


def fails_on(value: float) -> Callable[[Tensor], None]:
    def judge(x: Tensor) -> None:
        if bool((x == value).any()):
            raise ValueError(f"the value {value}")

    return judge


def fails_above(rows: int) -> Callable[[Tensor], None]:
    def judge(x: Tensor) -> None:
        if x.shape[0] > rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    return judge


def _row(*values: float, **others: Tensor) -> dict[str, Tensor]:
    return {"x": torch.tensor([values]), **others}


FREE = build.spec("x", dims=(-1,))
SENT = [_row(1.0), _row(2.0), _row(3.0), _row(4.0), _row(5.0)]


@pytest.mark.parametrize(
    ("model", "sent", "expected", "overrides"),
    [
        pytest.param(
            Scratch(),
            [_row(1.0), _row(10.0, 10.0), _row(3.0)],
            [2.0, 20.0, 6.0],
            {},
            id="shapes",
        ),
        pytest.param(
            Scratch(), SENT, [2.0, 4.0, 6.0, 8.0, 10.0], {"batch_buckets": (2,)}, id="buckets"
        ),
        pytest.param(
            Scratch(),
            [_row(1.0, n=torch.full((1, 1), n)) for n in (1, 2, 1)],
            [2.0, 4.0, 2.0],
            {"inputs": (FREE, build.spec("n", "INT64", (1,)))},
            id="scalars",
        ),
        pytest.param(
            Scratch(),
            [_row(1.0), _row(2.0, by=torch.ones(1, 1)), _row(3.0)],
            [2.0, 5.0, 6.0],
            {"inputs": (FREE, dataclasses.replace(build.spec("by", dims=(-1,)), optional=True))},
            id="optional inputs",
        ),
        pytest.param(
            Scratch(fails=fails_on(2.0)),
            SENT,
            [2.0, ForwardError, 6.0, 8.0, 10.0],
            {},
            id="bisection",
        ),
        pytest.param(
            Scratch(fails=fails_above(2)), SENT, [2.0, 4.0, 6.0, 8.0, 10.0], {}, id="out of memory"
        ),
        pytest.param(
            Scratch(),
            [{"x": torch.tensor([value])} for value in (1.0, 2.0, 3.0)],
            [2.0, 4.0, 6.0],
            {"max_batch_size": 0},
            id="without a batch dimension",
        ),
    ],
)
def test_outputs_in_reused_memory(
    model: Scratch, sent: list[Any], expected: list[Any], overrides: dict[str, Any]
) -> None:
    """Each request keeps its own outputs when one run calls the model several times."""
    inputs = overrides.pop("inputs", (FREE,))
    made = whole(model, inputs, (build.spec("y", dims=(-1,)),), **overrides)

    outcomes = made.run(sent)

    assert model.calls > 1
    assert [
        type(one) if isinstance(one, BackendError) else one["y"].flatten()[0].item()
        for one in outcomes
    ] == expected


def test_outputs_of_a_single_call_are_not_copied() -> None:
    """A run of one call copies no outputs, whatever memory they share."""
    memory = torch.zeros(8, 4)
    outcomes = engine(lambda x: memory[: x.shape[0]]).run(items((1, 4), (2, 4)))

    (first, second) = (cast("dict[str, Tensor]", one)["y"] for one in outcomes)
    assert first.data_ptr() == memory.data_ptr()
    assert second.data_ptr() == memory[1].data_ptr()
