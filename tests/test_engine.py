"""The engine: how often the model is called, with what, and what becomes of each item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import build
import pytest
import torch
from torch import Tensor

from torch_py_backend import binding, runtime
from torch_py_backend.binding import Argument, Passing
from torch_py_backend.engine import Engine
from torch_py_backend.errors import BackendError, BindingError, InputError, OutputError
from torch_py_backend.options import Options


class Recorder:
    """A function that remembers what it was called with."""

    def __init__(self, function: Callable[[Tensor], Any] = lambda x: x) -> None:
        self.calls: list[Tensor] = []
        self._function = function

    def __call__(self, x: Tensor) -> Any:
        self.calls.append(x)
        return self._function(x)


def engine(function: Callable[..., Any], **overrides: Any) -> Engine:
    """An engine of one input `x` and one output `y`, both FP32 [-1] unless told otherwise."""
    spec = build.spec("x", dims=(-1,))
    settings = build.config(inputs=(spec,), outputs=(build.spec("y", dims=(-1,)),), **overrides)
    argument = Argument("x", True, Passing.POSITIONAL, False, "x")
    inputs = binding.bind_inputs(settings.name, ["x"], [argument])
    surroundings = runtime.surround(Options(), torch.device("cpu"), ())
    return Engine(settings, function, inputs, surroundings)


def items(*shapes: tuple[int, ...]) -> list[dict[str, Tensor]]:
    return [{"x": torch.rand(shape)} for shape in shapes]


def test_one_call_for_a_batch() -> None:
    """Items of one shape are one call, whatever their row counts."""
    model = Recorder()
    sent = items((1, 4), (3, 4), (2, 4))
    outcomes = engine(model).run(sent)
    assert [call.shape for call in model.calls] == [(6, 4)]
    for item, outcome in zip(sent, outcomes, strict=True):
        assert isinstance(outcome, dict)
        assert torch.equal(outcome["y"], item["x"])


def test_one_item_is_not_copied() -> None:
    """A batch of one item is that item's own memory, in and out."""
    model = Recorder()
    (item,) = items((2, 4))
    (outcome,) = engine(model).run([item])
    assert isinstance(outcome, dict)
    assert model.calls[0].data_ptr() == item["x"].data_ptr() == outcome["y"].data_ptr()


def test_shapes_are_called_apart() -> None:
    """Items that cannot share a batch get a call a shape, and their places in the answer."""
    model = Recorder()
    sent = items((1, 4), (1, 5), (2, 4))
    outcomes = engine(model).run(sent)
    assert sorted(call.shape for call in model.calls) == [(1, 5), (3, 4)]
    for item, outcome in zip(sent, outcomes, strict=True):
        assert isinstance(outcome, dict)
        assert torch.equal(outcome["y"], item["x"])


def test_unbatched_items_are_called_one_by_one() -> None:
    """With max_batch_size 0 the model never sees two requests at once."""
    model = Recorder()
    outcomes = engine(model, max_batch_size=0).run(items((4,), (4,), (4,)))
    assert [call.shape for call in model.calls] == [(4,)] * 3
    assert all(isinstance(outcome, dict) for outcome in outcomes)


def test_a_wrong_item_leaves_before_batching() -> None:
    """An item without its input gets the error; the model is called with the others."""
    model = Recorder()
    outcomes = engine(model).run([{}, *items((2, 4))])
    assert isinstance(outcomes[0], InputError)
    assert isinstance(outcomes[1], dict)
    assert [call.shape for call in model.calls] == [(2, 4)]


def test_a_group_that_fails_leaves_the_others_alone() -> None:
    """forward() raising for one shape does not touch items of another."""

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
    """The model runs without gradients, in inference mode unless the config says otherwise."""
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return x

    made = engine(look)
    made._runtime = runtime.surround(Options(inference_mode=mode), torch.device("cpu"), ())
    made.run(items((1, 4)))
    assert seen == [(expected, False)]


def test_a_result_of_another_kind_later() -> None:
    """A result that has lost its structure is an error of that batch, not a crash."""
    results: list[Any] = [{"y": torch.ones(1, 4)}, torch.ones(1, 4), {"z": torch.ones(1, 4)}]
    made = engine(lambda x: results.pop(0))
    outcomes = [made.run(items((1, 4)))[0] for _ in range(3)]
    assert isinstance(outcomes[0], dict)
    for outcome in outcomes[1:]:
        assert isinstance(outcome, OutputError)
        assert "unlike its first result" in str(outcome)


def test_a_result_that_does_not_bind() -> None:
    """Names that the first result does not have are an error, and not forgotten at the next."""
    made = engine(lambda x: (x, x))
    made._names = ("OUTPUT__2",)
    for _ in range(2):
        (outcome,) = made.run(items((1, 4)))
        assert isinstance(outcome, BindingError)
