"""Replacement of the weights of a loaded model."""

from __future__ import annotations

import build
import fake_gpu
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature import introspection
from torch_py_backend.weights import weight_swap


class _First(fake_gpu.OnGpu):
    device = torch.device("cuda", 0)


class _Second(fake_gpu.OnGpu):
    device = torch.device("cuda", 1)


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_copies_are_waited_for(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap ends when all devices have the new weights, or the old ones again.

    It begins when no device reads the old ones any more: a stream may be between two calls.
    """
    old = {
        "a": torch.zeros(2).as_subclass(_First),
        "b": torch.zeros(2).as_subclass(_Second),
        "c": torch.zeros(2),
    }
    waits: list[tuple[torch.device, list[float]]] = []
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: waits.append((device, old["a"].tolist()))
    )
    module = Net()
    loaded = Loaded(build.artifact(), module, introspection.from_function(module.forward), module)
    replacement = Loaded(build.artifact(), module, loaded.signature, Net())
    new = {name: torch.ones(2) for name in old}

    errors = [RuntimeError("the copy fails")] * fails

    def copy(tensor: Tensor, value: Tensor) -> Tensor:
        if errors:
            raise errors.pop()
        return Tensor.copy_(tensor, value)

    monkeypatch.setattr(_Second, "copy_", copy, raising=False)
    monkeypatch.setattr(weight_swap, "weights", lambda model: old if model is loaded else new)
    if fails:
        with pytest.raises(RuntimeError, match="the copy fails"):
            weight_swap.swap(build.config(), loaded, replacement)
    else:
        weight_swap.swap(build.config(), loaded, replacement)
    values = [[0.0] * 2, [0.0 if fails else 1.0] * 2]
    assert [value for _, value in waits] == [values[0], values[0], values[1], values[1]]
    for devices in waits[:2], waits[2:]:
        assert {device for device, _ in devices} == {
            torch.device("cuda", 0),
            torch.device("cuda", 1),
        }
    assert old["a"].tolist() == values[1]


class Expanded(nn.Module):
    """A model with a buffer that cannot be written in place, after a weight that can."""

    shared: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), value))
        self.register_buffer("shared", torch.tensor([value]).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shared


def test_a_weight_that_can_be_neither_replaced_nor_restored() -> None:
    """All other weights have their old values again, and the error is that of the first failure."""
    old, new = Expanded(1.0), Expanded(2.0)
    signature = introspection.from_function(old.forward)
    loaded, replacement = (
        Loaded(build.artifact(), module, signature, module) for module in (old, new)
    )
    with pytest.raises(RuntimeError, match="single memory location"):
        weight_swap.swap(build.config(), loaded, replacement)
    assert old(torch.ones(3)).tolist() == [2.0] * 3
