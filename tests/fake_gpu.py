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


class PageLocked(Tensor):
    """Page-locked memory, which is written by blocking copies only.

    Its memory may be freed after an error that the GPU does not recover from. torch then records an
    event for each stream of an asynchronous copy, and the error of that ends the process.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    waits: list[torch.device]

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert not non_blocking
        self.waits.append(DEVICE)
        return super().copy_(source)


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
        if not pin_memory:
            return empty(*args, **options)
        memory = empty(*args, **options).as_subclass(PageLocked)
        memory.waits = waits
        return memory

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return waits
