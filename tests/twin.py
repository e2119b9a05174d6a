"""The twin of a GPU's memory on a CPU: exported memory is a file without a name, which others map.

What is exported is a copy; else it behaves as the driver does: what is mapped is mapped for
writing, and of an owner that is gone nothing can be mapped.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from torch import Tensor

from torch_py_backend.weights.cuda_ipc import NotShared


class Twin:
    """Memory of the CPU as `gpu_sharing.Memory`."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def name(self) -> str:
        return "CPU-0"

    def export(self, tensor: Tensor) -> tuple[str, int]:
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if start not in self._files:
            self._files[start] = os.memfd_create("twin")
            os.write(self._files[start], ctypes.string_at(start, size))
        return f"/proc/{os.getpid()}/fd/{self._files[start]}:{size}", tensor.data_ptr() - start

    def open(self, block: str) -> Tensor:
        path, _, size = block.rpartition(":")
        if not Path(path).exists():
            raise NotShared(f"{path} is gone")
        return torch.from_file(path, shared=True, size=int(size), dtype=torch.uint8)

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None: ...


def mapped(process: int) -> int:
    """How many mappings of a twin's memory a process has."""
    return Path(f"/proc/{process}/maps").read_text().count("/memfd:twin")
