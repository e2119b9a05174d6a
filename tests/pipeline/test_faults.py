"""Classification of exceptions."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_py_backend.pipeline import faults

_SCRIPT = """\
The following operation failed in the TorchScript interpreter.
Traceback of TorchScript (most recent call last):
  File "<string>", line 3, in forward
RuntimeError: {}
"""


def accelerator(code: int, text: str = "CUDA error: something") -> RuntimeError:
    """Return what torch raises for a CUDA error."""
    error: Any = torch.AcceleratorError(text)
    error.error_code = code
    result: RuntimeError = error
    return result


def chained(cause: BaseException, *, explicitly: bool) -> BaseException:
    """Return an exception raised from, or while handling, another one."""
    try:
        try:
            raise cause
        except BaseException as error:
            raise ValueError("later") from (error if explicitly else None)
    except ValueError as error:
        return error


def raised(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:  # whatever it is
        return error
    raise AssertionError


@torch.jit.script
def _script_takes_all(size: int) -> torch.Tensor:
    return torch.empty(size)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(torch.OutOfMemoryError("CUDA out of memory. Tried"), True, id="CUDA"),
        pytest.param(raised(lambda: torch.empty(10**15)), True, id="CPU, the real one"),
        pytest.param(raised(lambda: _script_takes_all(10**15)), True, id="in TorchScript, real"),
        pytest.param(MemoryError(), True, id="Python"),
        pytest.param(RuntimeError("std::bad_alloc"), True, id="C++ through torch"),
        pytest.param(
            RuntimeError(_SCRIPT.format("CUDA out of memory. Tried to allocate 2.00 GiB")),
            True,
            id="CUDA in TorchScript",
        ),
        pytest.param(accelerator(2, "CUDA error: out of memory"), True, id="of CUDA itself"),
        pytest.param(
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            True,
            id="cuBLAS",
        ),
        pytest.param(
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
            ),
            True,
            id="cuBLAS's first use",
        ),
        pytest.param(
            RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm`"),
            False,
            id="cuBLAS, later",
        ),
        pytest.param(
            RuntimeError("Triton Error [CUDA]: out of memory"), True, id="a Triton kernel"
        ),
        pytest.param(
            RuntimeError("CUDA driver error: out of memory"), True, id="the driver, for a kernel"
        ),
        pytest.param(RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), True, id="cuFFT"),
        pytest.param(
            RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `f`. "),
            True,
            id="cuSOLVER",
        ),
        pytest.param(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True, id="cuDNN 8"),
        pytest.param(
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
            True,
            id="cuDNN 9, the GPU's memory",
        ),
        pytest.param(
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
            True,
            id="cuDNN 9, the host's memory",
        ),
        pytest.param(
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), False, id="cuDNN, internal"
        ),
        pytest.param(chained(MemoryError(), explicitly=True), True, id="the cause"),
        pytest.param(chained(MemoryError(), explicitly=False), True, id="the context"),
        pytest.param(ValueError("CUDA out of memory."), False, id="a model's own class"),
        pytest.param(
            RuntimeError("bad word 'CUDA out of memory. Tried'"), False, id="a client's words"
        ),
        pytest.param(accelerator(710), False, id="an assertion"),
    ],
)
def test_out_of_memory(error: BaseException, expected: bool) -> None:
    """Out-of-memory errors are recognized, but not in messages that a client could compose."""
    assert faults.out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(accelerator(710), True, id="an assertion"),
        pytest.param(accelerator(2), False, id="out of memory"),
        pytest.param(chained(accelerator(700), explicitly=True), True, id="the cause"),
        pytest.param(chained(accelerator(700), explicitly=False), True, id="the context"),
        pytest.param(
            RuntimeError("CUDA error: device-side assert triggered"), False, id="words alone"
        ),
        pytest.param(torch.AcceleratorError("CUDA error"), False, id="without a code"),
    ],
)
def test_sticky(error: BaseException, expected: bool) -> None:
    """Sticky errors are recognized by CUDA's error numbers, never by the message."""
    assert faults.is_sticky(error) is expected


def test_odd_exceptions() -> None:
    """Neither a message that cannot be read nor a cycle of causes is a problem."""

    class SpeechlessError(RuntimeError):
        def __str__(self) -> str:
            raise KeyError

    one, other = SpeechlessError(), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not faults.out_of_memory(one)
    assert not faults.is_sticky(one)


@pytest.mark.parametrize("explicitly", [True, False])
def test_release(explicitly: bool) -> None:
    """The frames of an exception are cleared before the retry, while the exception is kept."""

    class Activation:
        pass

    held: list[weakref.ref[Activation]] = []

    def forward() -> None:
        activation = Activation()
        held.append(weakref.ref(activation))
        raise MemoryError

    try:
        forward()
    except MemoryError as error:
        caught = chained(error, explicitly=explicitly)
    gc.collect()
    assert held[0]() is not None

    faults.release(caught)

    gc.collect()
    assert held[0]() is None
