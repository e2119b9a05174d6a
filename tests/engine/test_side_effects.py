"""Detection of writes to inputs and buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.engine import side_effects
from torch_py_backend.engine.side_effects import SideEffects


class Counter(nn.Module):
    """Counts in a buffer: in place, or by replacing it."""

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


@pytest.mark.parametrize(
    ("in_place", "mode"), [(True, torch.inference_mode), (False, torch.no_grad)]
)
def test_buffers_that_are_written(in_place: bool, mode: Any) -> None:
    """A buffer that is written or replaced is detected; first calls may fill tables."""
    model = Counter(in_place=in_place)
    effects = SideEffects(model)
    assert not effects.writes_buffers()
    with mode():
        model(torch.ones(1))
    assert effects.writes_buffers()
    effects.reset_baseline()
    assert not effects.writes_buffers()


class Late(nn.Module):
    """Creates its counter in the first call, in inference mode; torch does not count its writes."""

    count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros((), dtype=torch.bfloat16))
        self.count += x.sum()
        return x


@pytest.mark.parametrize(("value", "writes"), [(1.0, True), (0.0, False)])
def test_buffers_made_in_inference_mode(value: float, writes: bool) -> None:
    """A buffer created in inference mode is compared by its values."""
    model = Late()
    effects = SideEffects(model)
    with torch.inference_mode():
        model(torch.ones(1))
        effects.reset_baseline()
        assert not effects.writes_buffers()
        model(torch.full((1,), value))
    assert effects.writes_buffers() == writes


@pytest.mark.parametrize(
    "model", [nn.BatchNorm1d(4).eval(), torch.jit.script(nn.BatchNorm1d(4).eval())]
)
def test_models_without_side_effects(model: nn.Module) -> None:
    """A model in eval mode keeps its buffers; also in TorchScript."""
    effects = SideEffects(model)
    with torch.inference_mode():
        model(torch.rand(2, 4))
    assert not effects.writes_buffers()


@pytest.mark.parametrize(
    ("value", "write"),
    [
        pytest.param(np.ones((2, 4), np.float32), lambda x: x.__imul__(2), id="array"),
        pytest.param(torch.ones(2, 4, dtype=torch.bfloat16), lambda x: x.mul_(2), id="bfloat16"),
        # As the warm-up creates it.
        pytest.param(torch.rand(1).as_strided((1,), (0,)), lambda x: x.add_(1), id="stride of 0"),
        pytest.param(torch.full((2,), torch.nan), lambda x: x.zero_(), id="NaN"),
    ],
)
def test_inputs_that_are_written(value: Any, write: Any) -> None:
    """A model that writes to its inputs is detected."""
    effects, item = SideEffects(None), {"x": value}
    before = side_effects.copy_tensors(item)
    assert not effects.observed
    effects.compare(before, item)
    assert effects.observed
    assert not effects.writes_inputs
    write(value)
    effects.compare(before, item)
    assert effects.writes_inputs
    effects.compare(side_effects.copy_tensors(item), item)
    assert effects.writes_inputs


@pytest.mark.parametrize(
    "value",
    [
        torch.full((2,), torch.nan),
        torch.ones(0, 4),
        np.array(["a"], dtype=np.object_),
    ],
    ids=["NaN", "empty", "strings"],
)
def test_inputs_that_are_not_written(value: Any) -> None:
    """NaN compares equal to the same NaN, and strings are not compared."""
    effects, item = SideEffects(None), {"x": value}
    effects.compare(side_effects.copy_tensors(item), item)
    assert not effects.writes_inputs
