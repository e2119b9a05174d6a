"""GPU memory shared between processes by CUDA's inter-process handles, through the driver's API.

The handles of torch.multiprocessing are for tensors in transit: each is for one receiver, and they
count references in files that a killed process leaves in /dev/shm. Weights stay where they are and
have a known owner, so the driver's handles are enough, and leave no files.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class NotShared(Exception):  # noqa: N818  its text is a part of the caller's message
    """Memory cannot be shared with another process."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class CudaMemory:
    """Exports and opens memory of one GPU.

    Attributes:
        device: the GPU; its ordinal may differ in other processes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._driver = ctypes.CDLL("libcuda.so.1")

    def name(self) -> str:
        """Return the UUID of the GPU."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def export(self, tensor: Tensor) -> tuple[str, int]:
        """Return the handle of a tensor's allocation, as text, and the tensor's offset in it.

        Raises:
            NotShared: the driver does not share the allocation.
        """
        self._enter()
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        address = ctypes.c_uint64(tensor.data_ptr())
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        content = bytes(memoryview(handle).cast("B"))
        return f"{content.hex()}:{size.value}", tensor.data_ptr() - base.value

    def open(self, block: str) -> Tensor:
        """Map an allocation of another process, as bytes, until the last view of it is freed.

        Raises:
            NotShared: its owner has ended, or the driver does not share it.
        """
        self._enter()
        content, _, size = block.partition(":")
        handle = _Handle.from_buffer_copy(bytes.fromhex(content))
        pointer = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, _LAZY_ENABLE_PEER_ACCESS)
        mapped = _Mapped(pointer.value, int(size))
        # Not at exit: the end of the process unmaps it, and the driver may be unloaded before.
        weakref.finalize(mapped, self._close, pointer.value).atexit = False
        return torch.as_tensor(mapped, device=self.device)

    def synchronize(self) -> None:
        """Wait until all work on the GPU is done."""
        torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Free the memory that torch's allocator caches."""
        torch.cuda.empty_cache()

    def _close(self, pointer: int) -> None:
        self._enter()
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def _enter(self) -> None:
        """Make the device's context current in this thread, and wait for its work."""
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize(self.device)

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(text))
            raise NotShared(f"{function} returned {(text.value or b'?').decode()}")


class _Mapped:
    """Bytes on a GPU with __cuda_array_interface__; tensors keep a reference to the object."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }
