import numpy as np
import pytest
import torch

from torch_py_backend.config import dtypes
from torch_py_backend.config.dtypes import DType

WITH_TORCH = [one for one in dtypes.TABLE if one.torch is not None]
WITH_BOTH = [one for one in WITH_TORCH if one.numpy is not None]
# `enum DataType` of Triton's model_config.proto, without TYPE_INVALID.
TRITON_TYPES = [
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "STRING", "BF16"),
]


def named(dtype: DType) -> str:
    return dtype.triton


def test_table() -> None:
    """The table contains each type of config.pbtxt once."""
    assert sorted(dtype.config for dtype in dtypes.TABLE) == sorted(
        f"TYPE_{name}" for name in TRITON_TYPES
    )


@pytest.mark.parametrize("dtype", dtypes.TABLE, ids=named)
def test_from_config(dtype: DType) -> None:
    """A type is found by its name in config.pbtxt."""
    assert dtypes.from_config(dtype.config) is dtype


def test_name_of_strings() -> None:
    """Strings are BYTES in requests and TYPE_STRING in config.pbtxt."""
    found = dtypes.from_config("TYPE_STRING")

    assert found is not None
    assert found.triton == "BYTES"
    assert dtypes.from_config("TYPE_BYTES") is None


@pytest.mark.parametrize("name", ["TYPE_INVALID", "", "FP32", "type_fp32", "TYPE_FP8"])
def test_unknown_name(name: str) -> None:
    """A name that Triton does not define has no type."""
    assert dtypes.from_config(name) is None


@pytest.mark.parametrize("dtype", WITH_TORCH, ids=named)
def test_torch_name(dtype: DType) -> None:
    """The torch name is an attribute of torch; the size matches Triton's name."""
    found = getattr(torch, str(dtype.torch))
    digits = "".join(filter(str.isdigit, dtype.triton)) or "8"  # BOOL: one byte

    assert isinstance(found, torch.dtype)
    assert found.itemsize * 8 == int(digits)


@pytest.mark.parametrize("dtype", WITH_BOTH, ids=named)
def test_numpy_name(dtype: DType) -> None:
    """An array of the numpy type becomes a tensor of the torch type."""
    array = np.zeros(1, dtype=dtype.numpy)

    assert torch.from_numpy(array).dtype is getattr(torch, str(dtype.torch))


@pytest.mark.parametrize("dtype", WITH_TORCH, ids=named)
def test_tensors_of_every_type_can_be_batched(dtype: DType) -> None:
    """Tensors of each type can be concatenated and split."""
    ones = torch.ones(1, 2, dtype=getattr(torch, str(dtype.torch)))
    first, second = torch.cat([ones, ones]).split_with_sizes([1, 1])

    assert torch.equal(first, second)
