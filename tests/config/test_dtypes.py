"""The table of element types."""

import numpy as np
import pytest
import torch

from torch_py_backend.config import dtypes
from torch_py_backend.errors import ConfigError

# `enum DataType` of Triton's model_config.proto, without TYPE_INVALID.
TRITON_TYPES = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16"


def test_names_in_a_config() -> None:
    """Names are those of config.pbtxt, each once: strings are BYTES in requests."""
    names = [dtype.config for dtype in dtypes.TABLE]
    assert sorted(names) == sorted(f"TYPE_{name}" for name in TRITON_TYPES.split())
    assert dtypes.parse("x", "TYPE_STRING") is dtypes.from_triton("BYTES")
    for name in ("TYPE_BYTES", "TYPE_INVALID", "", "FP32", "type_fp32"):
        with pytest.raises(ConfigError, match=f"x has data_type {name}; expected one of TYPE_BOOL"):
            dtypes.parse("x", name)


def test_names_in_torch_and_numpy_mean_the_same_type() -> None:
    for dtype in dtypes.TABLE[:-1]:  # without strings
        torch_dtype: torch.dtype = getattr(torch, str(dtype.torch))
        digits = "".join(filter(str.isdigit, dtype.triton)) or "8"  # BOOL: one byte
        assert torch_dtype.itemsize * 8 == int(digits)
        assert dtypes.config_name(str(dtype.torch)) == dtype.config
        if dtype.numpy is not None:
            assert torch.from_numpy(np.zeros(1, dtype=dtype.numpy)).dtype is torch_dtype
