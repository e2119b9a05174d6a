"""A model for several processes, which values in its input make fail; and those processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import living
import psutil
import torch
from torch import Tensor, nn

SOURCE = """
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def tensor_parallel_plan(self):
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def forward(self, x: Tensor) -> Tensor:
        what = int(x[0, 0])
        rank = dist.get_rank() if dist.is_initialized() else 0
        if what == 101:
            raise ValueError("all refuse this")
        if (what, rank) == (102, 0):
            raise ValueError("one refuses this")
        if (what, rank) == (103, 1):
            raise RuntimeError("one cannot")
        if (what, rank) == (104, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.down(torch.relu(self.up(x)))
"""


class Wide(nn.Module):
    """As in the source, in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def wide() -> Wide:
    """With the same weights each time."""
    module = Wide()
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.arange(parameter.numel(), dtype=torch.float32)
            parameter.copy_(torch.sin(values).reshape(parameter.shape))
    return module


def expected(x: Any) -> Any:
    """What the model answers, computed in one process."""
    with torch.no_grad():
        return wide()(torch.as_tensor(x))


def write(version: Path) -> None:
    """The model's files in its version folder."""
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(SOURCE, encoding="utf-8")
    torch.save(wide().state_dict(), version / "model.pt")


def workers(process: int) -> list[psutil.Process]:
    """The processes that live and that this one, or one below it, computes with."""
    return [one for one in living.descendants(process) if "workers.attend()" in living.command(one)]
