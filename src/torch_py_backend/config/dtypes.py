"""The table of element types with their names in Triton, torch and numpy; imports neither."""

from __future__ import annotations

from typing import NamedTuple

from torch_py_backend.errors import ConfigError


class DType(NamedTuple):
    """An element type: its name in requests (`FP32`), in torch (`float32`) and in numpy, if any."""

    triton: str
    torch: str | None
    numpy: str | None

    @property
    def config(self) -> str:
        """The name in config.pbtxt."""
        return "TYPE_STRING" if self.triton == "BYTES" else f"TYPE_{self.triton}"


_INTEGERS = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
TABLE = (
    DType("BOOL", "bool", "bool"),
    *(DType(name, name.lower(), name.lower()) for name in _INTEGERS),
    *(DType(f"FP{bits}", f"float{bits}", f"float{bits}") for bits in (16, 32, 64)),
    DType("BF16", "bfloat16", None),
    DType("BYTES", None, "object"),
)


def config_name(dtype: object) -> str:
    """Return the name of a torch.dtype in config.pbtxt, or its own if Triton has no such type."""
    name = str(dtype).removeprefix("torch.")
    return next((known.config for known in TABLE if known.torch == name), str(dtype))


def from_triton(name: str) -> DType:
    """Return the type with this name in requests."""
    return {dtype.triton: dtype for dtype in TABLE}[name]


def parse(subject: str, name: str) -> DType:
    """Return the type of `subject` in config.pbtxt; raise ConfigError if it is unknown."""
    types = {dtype.config: dtype for dtype in TABLE}
    if name not in types:
        raise ConfigError(f"{subject} has data_type {name}", expected=f"one of {', '.join(types)}")
    return types[name]
