"""A substitute for a GPU: tensors that claim to be on one."""

from __future__ import annotations

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

    def cpu(self, *_: Any) -> Tensor:
        return self.clone()


def put(tensor: Tensor) -> Tensor:
    return tensor.clone().as_subclass(OnGpu)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch use the substitute, for which nothing is waited."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
