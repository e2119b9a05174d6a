"""The table of element types with their names in Triton, torch and numpy; imports neither."""

from __future__ import annotations

from typing import NamedTuple

from torch_py_backend.errors import ConfigError


class DType(NamedTuple):
    """An element type.

    Attributes:
        triton: the name in requests and responses (`FP32`).
        torch: the attribute of the torch module (`float32`), or None for strings.
        numpy: numpy's name, or None where numpy has no such type.
    """

    triton: str
    torch: str | None
    numpy: str | None

    @property
    def config(self) -> str:
        """The name in config.pbtxt."""
        return "TYPE_STRING" if self.triton == "BYTES" else f"TYPE_{self.triton}"


TABLE = (
    DType("BOOL", "bool", "bool"),
    DType("UINT8", "uint8", "uint8"),
    DType("UINT16", "uint16", "uint16"),
    DType("UINT32", "uint32", "uint32"),
    DType("UINT64", "uint64", "uint64"),
    DType("INT8", "int8", "int8"),
    DType("INT16", "int16", "int16"),
    DType("INT32", "int32", "int32"),
    DType("INT64", "int64", "int64"),
    DType("FP16", "float16", "float16"),
    DType("FP32", "float32", "float32"),
    DType("FP64", "float64", "float64"),
    DType("BF16", "bfloat16", None),
    DType("BYTES", None, "object"),
)

_BY_CONFIG = {dtype.config: dtype for dtype in TABLE}
_BY_TORCH = {dtype.torch: dtype for dtype in TABLE}
_BY_TRITON = {dtype.triton: dtype for dtype in TABLE}


def from_torch(dtype: object) -> DType:
    """Return the type for a torch.dtype; raise KeyError if Triton has none."""
    return _BY_TORCH[str(dtype).removeprefix("torch.")]


def config_name(dtype: object) -> str:
    """Return the name of a torch.dtype in config.pbtxt, or its own if Triton has no such type."""
    known = _BY_TORCH.get(str(dtype).removeprefix("torch."))
    return known.config if known is not None else str(dtype)


def from_triton(name: str) -> DType:
    """Return the type with this name in requests."""
    return _BY_TRITON[name]


def parse(subject: str, name: str) -> DType:
    """Return the type of `subject` in config.pbtxt; raise ConfigError if it is unknown."""
    if name not in _BY_CONFIG:
        names = ", ".join(_BY_CONFIG)
        raise ConfigError(f"{subject} has data_type {name}", expected=f"one of {names}")
    return _BY_CONFIG[name]
