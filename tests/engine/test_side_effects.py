"""Whether a model is seen to change what it must not, to be called twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.engine import side_effects
from torch_py_backend.engine.side_effects import Purity


class Counter(nn.Module):
    """Counts in a buffer: in place, or in a new one."""

    count: Tensor

    def __init__(self, *, in_place: bool = True) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self._in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self._in_place:
            self.count += 1
        else:
            self.count = self.count + 1
        return x


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_buffers_that_are_written(in_place: bool, mode: Any) -> None:
    """A buffer that is written, or put in another's place, is noticed."""
    model = Counter(in_place=in_place)
    made = Purity(model)
    assert not made.writes_buffers()

    with mode():
        model(torch.ones(1))

    assert made.writes_buffers()


class Late(nn.Module):
    """Makes its counter in the first call, in inference mode; torch does not count its writes."""

    count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros((), dtype=torch.bfloat16))
        self.count += x.sum()
        return x


@pytest.mark.parametrize(("value", "writes"), [(1.0, True), (0.0, False)])
def test_buffers_made_in_inference_mode(value: float, writes: bool) -> None:
    """A buffer that the first call has made is looked at by its values."""
    model = Late()
    made = Purity(model)
    with torch.inference_mode():
        model(torch.ones(1))
        made.settle()
        assert not made.writes_buffers()
        model(torch.full((1,), value))
    assert made.writes_buffers() == writes


def test_buffers_written_by_graphs() -> None:
    """A replay changes values without a trace in their versions."""
    model = Counter()
    made = Purity(model, captured=True)
    model.count.numpy()[:] = 3  # as a graph does, torch does not see it
    assert made.writes_buffers()


def test_what_the_warm_up_changed_is_no_state() -> None:
    """A table that the first calls make is the model's own affair."""
    model = Counter()
    made = Purity(model)
    model(torch.ones(1))

    made.settle()

    assert not made.writes_buffers()


@pytest.mark.parametrize(
    "model", [nn.BatchNorm1d(4).eval(), nn.Linear(4, 4), torch.jit.script(nn.BatchNorm1d(4).eval())]
)
def test_models_that_change_nothing(model: nn.Module) -> None:
    """A model in eval mode keeps its buffers, TorchScript's too."""
    made = Purity(model)
    with torch.inference_mode():
        model(torch.rand(2, 4))

    assert not made.writes_buffers()


def test_batch_norm_in_training() -> None:
    """Statistics that every batch changes are state."""
    model = nn.BatchNorm1d(4).train()
    made = Purity(model)
    with torch.inference_mode():
        model(torch.rand(2, 4))

    assert made.writes_buffers()


def test_models_without_buffers_at_hand() -> None:
    """A function, or a package, shows nothing."""
    assert not Purity(None).writes_buffers()


@pytest.mark.parametrize(
    ("value", "write"),
    [
        pytest.param(torch.ones(2, 4), lambda x: x.mul_(2), id="tensor"),
        pytest.param(np.ones((2, 4), np.float32), lambda x: x.__imul__(2), id="array"),
        pytest.param(torch.ones(2, 4, dtype=torch.bfloat16), lambda x: x.mul_(2), id="bfloat16"),
        pytest.param(torch.tensor([True, False]), lambda x: x.logical_not_(), id="bool"),
        pytest.param(torch.full((2,), torch.nan), lambda x: x.zero_(), id="NaN"),
    ],
)
def test_inputs_that_are_written(value: Any, write: Any) -> None:
    """A model that computes in its inputs cannot be given them again."""
    made, item = Purity(None), {"x": value}
    before = side_effects.copied(item)
    assert not made.known
    made.compare(before, item)
    assert made.known
    assert not made.writes_inputs()

    write(value)
    made.compare(before, item)
    assert made.writes_inputs()

    made.compare(side_effects.copied(item), item)
    assert made.writes_inputs()


@pytest.mark.parametrize(
    "value",
    [
        torch.full((2,), torch.nan),
        torch.ones(0, 4),
        torch.tensor(1.0),
        np.array(["a"], dtype=np.object_),
    ],
    ids=["NaN", "empty", "scalar", "strings"],
)
def test_inputs_that_are_left_alone(value: Any) -> None:
    """NaN is the same NaN, and strings cannot be written."""
    made, item = Purity(None), {"x": value}
    made.compare(side_effects.copied(item), item)

    assert not made.writes_inputs()


def test_one_value_with_a_stride_of_0() -> None:
    """A single number, as the warm-up makes it up for an argument, is compared as others are."""
    value = torch.rand(1).as_strided((1,), (0,))
    made = Purity(None)
    before = side_effects.copied({"x": value})
    made.compare(before, {"x": value})
    assert not made.writes_inputs()
    value.add_(1)
    made.compare(before, {"x": value})
    assert made.writes_inputs()
