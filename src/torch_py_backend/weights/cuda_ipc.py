"""Memory of a GPU that another process maps: CUDA's inter-process handles, by the driver's API.

PyTorch has handles of its own, for tensors in transit: they count references in files that a killed
process leaves in /dev/shm, and each is for one receiver. Weights stay where they are, and their
owner is known: the driver's handles, which leave nothing behind, are enough.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class NotShared(Exception):  # noqa: N818  a refusal, which the caller puts into its sentence
    """This memory cannot be had by another process."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class CudaMemory:
    """What one GPU's processes tell each other of its memory.

    Attributes:
        device: the GPU, as this process knows it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._driver: Any = ctypes.CDLL("libcuda.so.1")

    def name(self) -> str:
        """The GPU's own: ordinals differ between processes that see different GPUs."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def export(self, tensor: Tensor) -> tuple[str, int]:
        """The allocation that a tensor lies in, as another process may open it; and where in it.

        Raises:
            NotShared: it cannot be shared.
        """
        self._enter()
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        address = ctypes.c_uint64(tensor.data_ptr())
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        told = bytes(memoryview(handle).cast("B"))
        return f"{told.hex()}:{size.value}", tensor.data_ptr() - base.value

    def open(self, block: str) -> Tensor:
        """An allocation of another process, as bytes; unmapped when the last view of it is gone.

        Raises:
            NotShared: its owner is gone, or the driver does not share it.
        """
        self._enter()
        told, _, size = block.partition(":")
        handle = _Handle.from_buffer_copy(bytes.fromhex(told))
        pointer = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, _LAZY_ENABLE_PEER_ACCESS)
        mapped = _Mapped(pointer.value, int(size))
        # Not at exit: the process's end unmaps it, and the driver may be gone before.
        weakref.finalize(mapped, self._close, pointer.value).atexit = False
        return torch.as_tensor(mapped, device=self.device)

    def settle(self) -> None:
        """Wait until all that was begun on the GPU is done."""
        torch.cuda.synchronize(self.device)

    def trim(self) -> None:
        """Give back what torch keeps for later use."""
        torch.cuda.empty_cache()

    def _close(self, pointer: int) -> None:
        self._enter()
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def _enter(self) -> None:
        """Make the device's context this thread's; what was begun there is done."""
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize(self.device)

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(text))
            raise NotShared(f"{function} says {(text.value or b'?').decode()}")


class _Mapped:
    """Bytes on a GPU, as the protocol __cuda_array_interface__ describes them; torch keeps this."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }
