"""The table of element types; the row `every_type` of scenarios.py compares its names in torch."""

from torch_py_backend.config import dtypes

# `enum DataType` of Triton's model_config.proto, without TYPE_INVALID.
TRITON_TYPES = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16"


def test_names_in_a_config() -> None:
    """Names are those of config.pbtxt, each once: strings are BYTES in requests."""
    names = [dtype.config for dtype in dtypes.TABLE]
    assert sorted(names) == sorted(f"TYPE_{name}" for name in TRITON_TYPES.split())
    assert dtypes.parse("x", "TYPE_STRING") is dtypes.from_triton("BYTES")
    assert [dtypes.config_name(f"torch.{one.torch}") for one in dtypes.TABLE[:-1]] == names[:-1]
