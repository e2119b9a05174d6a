"""A substitute for a GPU: tensors that say that they are on one, and streams that record waits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0)


class OnGpu(Tensor):
    """A tensor that says that it is on the GPU. Results of operations on it are on the host."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return DEVICE


def put(tensor: Tensor) -> Tensor:
    """Return a copy on the GPU."""
    return tensor.clone().as_subclass(OnGpu)


def install(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Let torch use the substitute; return the devices whose streams were waited for."""
    waits: list[torch.device] = []

    def current_stream(device: Any = DEVICE) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: waits.append(torch.device(device)))

    empty: Callable[..., Tensor] = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kw: empty(*args, **kw))
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return waits
