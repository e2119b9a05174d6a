"""A substitute for a GPU: tensors that say that they are on one, and streams that record waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0)


class OnGpu(Tensor):
    """A tensor with `is_cuda`. Results of operations on it are on the host.

    Its device is the CPU: torch can make no tensor beside it otherwise.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def put(tensor: Tensor) -> Tensor:
    """Return a copy on the GPU."""
    return tensor.clone().as_subclass(OnGpu)


def install(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Let torch use the substitute; return the devices whose streams were waited for."""
    waits: list[torch.device] = []
    empty = torch.empty

    def current_stream(device: Any = DEVICE) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: waits.append(torch.device(device)))

    def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return waits
