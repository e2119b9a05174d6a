"""Detection of writes to inputs and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
