"""What forward() gets of a column: the tensor itself, one value of it, or lists of strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.config.model_config import TensorSpec
from torch_py_backend.errors import BindingError
from torch_py_backend.signature.arguments import ArgumentType, Signature
from torch_py_backend.values import Strings, Value

_Make: TypeAlias = "Callable[[Any], object]"


class Argument(NamedTuple):
    """How an argument is made of a column.

    Attributes:
        convert: makes it, or raises ValueError with what is wrong with the column; None: it is the
            column.
        checks: whether `convert` may raise.
        scalar: whether it is one value, which all items of a call have.
    """

    convert: _Make | None = None
    checks: bool = False
    scalar: bool = False


TENSOR = Argument()


def choose(
    signature: Signature, spec: TensorSpec, takes: ArgumentType, cast: torch.dtype | None
) -> Argument:
    """Return how an input's argument is made; floating-point values are converted to `cast`.

    Raises:
        BindingError: the argument does not take the type of the input without loss.
    """
    kind = _KINDS[takes]
    accepted, make = kind.accepts, kind.make
    if takes is ArgumentType.TENSOR and (signature.torchscript or signature.leaves is not None):
        accepted = ("BOOL", "INT", "UINT", "FP", "BF16")
    if not spec.dtype.triton.startswith(accepted):
        raise BindingError(
            f"input '{spec.name}' is {spec.dtype.triton}, and {signature.name}() takes"
            f" {takes.value}",
            expected=f"{' or '.join(accepted)} in config.pbtxt",
        )
    if signature.torchscript and make is _text:  # its strings hold bytes of any encoding
        make = _text_or_bytes
    if kind.scalar:
        convert = partial(_one_value, f"{signature.name}() takes {takes.value}", make)
        return Argument(convert, checks=True, scalar=True)
    if spec.dtype.torch is None:
        return Argument(partial(_strings, takes, make), checks=True)
    dtype: torch.dtype = getattr(torch, spec.dtype.torch)
    if cast is None or not dtype.is_floating_point:
        return TENSOR
    return Argument(lambda column: column.to(cast))


def for_rows(argument: Argument) -> Argument:
    """Return how a list of the arguments of each row is made, for calls with one row each."""

    def convert_rows(column: Value) -> list[Any]:
        if isinstance(column, Tensor):
            rows: list[Any] = list(column.unbind())
        else:
            rows = [column[row, ...] for row in range(len(column))]
        return rows if argument.convert is None else list(map(argument.convert, rows))

    return Argument(convert_rows, argument.checks)


def _one_value(expected: str, make: _Make, column: Value) -> object:
    values = column.reshape(-1).tolist()
    distinct = len(set(map(repr, values)))  # repr, because NaN does not equal itself
    if distinct != 1:
        raise ValueError(f"holds {distinct} values; expected one value for all rows: {expected}")
    return make(values[0])


def _strings(takes: ArgumentType, make: _Make, column: Strings) -> object:
    """Return strings as a flat list, as LibTorch does, or in the shape of the column."""
    texts = list(map(make, column.reshape(-1).tolist()))
    if takes in (ArgumentType.STRINGS, ArgumentType.BYTES):
        return texts
    shaped: Strings = np.empty(column.shape, dtype=np.object_)
    shaped.ravel()[:] = texts
    return shaped if takes is ArgumentType.TENSOR else shaped.tolist()


def _text(text: str | bytes) -> str:
    """Decode UTF-8; states are decoded already."""
    try:
        return text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error.reason}") from None


def _text_or_bytes(text: str | bytes) -> str | bytes:
    try:
        return _text(text)
    except ValueError:
        return text


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


class _Kind(NamedTuple):
    """A kind of argument.

    Attributes:
        make: makes the argument of one value, or a part of it of one string.
        accepts: how the names of Triton's types begin that it takes.
        scalar: whether it is one value.
    """

    make: _Make
    accepts: tuple[str, ...] = ("BYTES",)
    scalar: bool = False


# Parts of containers are tensors.
_KINDS: Mapping[ArgumentType, _Kind] = {
    ArgumentType.TENSOR: _Kind(_text, ("",)),  # any type
    ArgumentType.VALUE: _Kind(
        lambda value: _text(value) if isinstance(value, bytes) else value, ("",), scalar=True
    ),
    ArgumentType.INT: _Kind(int, ("INT", "UINT"), scalar=True),
    ArgumentType.FLOAT: _Kind(float, ("FP", "BF16", "INT", "UINT"), scalar=True),
    ArgumentType.BOOL: _Kind(bool, ("BOOL",), scalar=True),
    ArgumentType.STR: _Kind(_text, scalar=True),
    ArgumentType.RAW: _Kind(_bytes, scalar=True),
    ArgumentType.STRINGS: _Kind(_text),
    ArgumentType.BYTES: _Kind(_bytes),
    ArgumentType.NESTED_STRINGS: _Kind(_text),
    ArgumentType.NESTED_BYTES: _Kind(_bytes),
}
