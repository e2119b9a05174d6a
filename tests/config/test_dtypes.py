import numpy as np
import pytest
import torch

from torch_py_backend.config import dtypes
from torch_py_backend.config.dtypes import DType

WITH_TORCH = [dtype for dtype in dtypes.TABLE if dtype.torch is not None]
# `enum DataType` of Triton's model_config.proto, without TYPE_INVALID.
TRITON_TYPES = [
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "STRING", "BF16"),
]


def test_table() -> None:
    """The table contains each type of config.pbtxt once."""
    assert sorted(dtype.config for dtype in dtypes.TABLE) == sorted(
        f"TYPE_{name}" for name in TRITON_TYPES
    )


def test_names_in_a_config() -> None:
    """Names are those of config.pbtxt: strings are TYPE_STRING there and BYTES in requests."""
    strings = dtypes.from_config("TYPE_STRING")

    assert strings is dtypes.from_triton("BYTES")
    for name in ("TYPE_BYTES", "TYPE_INVALID", "", "FP32", "type_fp32"):
        assert dtypes.from_config(name) is None


@pytest.mark.parametrize("dtype", WITH_TORCH, ids=lambda dtype: dtype.triton)
def test_other_names(dtype: DType) -> None:
    """The names in torch and numpy mean the same type, of the size in Triton's name."""
    torch_dtype: torch.dtype = getattr(torch, str(dtype.torch))
    digits = "".join(filter(str.isdigit, dtype.triton)) or "8"  # BOOL: one byte

    assert torch_dtype.itemsize * 8 == int(digits)
    if dtype.numpy is not None:
        assert torch.from_numpy(np.zeros(1, dtype=dtype.numpy)).dtype is torch_dtype
