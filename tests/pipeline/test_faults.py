"""Classification of exceptions."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_py_backend.pipeline import failures

_SCRIPT = """\
The following operation failed in the TorchScript interpreter.
Traceback of TorchScript (most recent call last):
  File "<string>", line 3, in forward
RuntimeError: {}
"""


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
        pytest.param(
            RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"),
            True,
            id="cuBLAS's first use",
        ),
        pytest.param(
            RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm`"),
            False,
            id="cuBLAS, later",
        ),
        *(
            pytest.param(RuntimeError(text), True, id=text.split(maxsplit=1)[0])
            for text in (
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasSgemm`",
                "Triton Error [CUDA]: out of memory",
                "cuFFT error: CUFFT_ALLOC_FAILED",
                "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            )
        ),
        pytest.param(
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), False, id="cuDNN, internal"
        ),
        pytest.param(chained(MemoryError(), explicitly=True), True, id="the cause"),
        pytest.param(chained(MemoryError(), explicitly=False), True, id="the context"),
        pytest.param(ValueError("CUDA out of memory."), False, id="a model's own class"),
        pytest.param(torch.AcceleratorError("CUDA error: an assertion"), False, id="an assertion"),
    ],
)
def test_out_of_memory(error: BaseException, expected: bool) -> None:
    """Out-of-memory errors are recognized, also those of libraries and of causes."""
    assert failures.out_of_memory(error) is expected


def test_cycle_of_causes() -> None:
    """A cycle of causes is no problem."""
    one, other = RuntimeError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not failures.out_of_memory(one)


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

    failures.release(caught)

    gc.collect()
    assert held[0]() is None
