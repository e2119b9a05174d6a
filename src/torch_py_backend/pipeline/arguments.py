"""What forward() gets of a column: the tensor itself, one value of it, or lists of strings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.config.model_config import TensorSpec
from torch_py_backend.errors import BindingError
from torch_py_backend.signature.arguments import ArgumentType, Signature
from torch_py_backend.values import Strings, Value

# Why a request's value is refused: what was found, and what was expected.
Refusal: TypeAlias = "tuple[str, str]"
_Refuse: TypeAlias = "Callable[[Value], Refusal | None]"


class Argument(NamedTuple):
    """A kind of argument; what is None is not needed.

    Attributes:
        refuse: returns the reason to refuse a value, or the values of several items together.
        key: what the values of a call have in common, beside their shapes; others are refused
            together.
        convert: makes the argument of a column.
    """

    refuse: _Refuse | None = None
    key: Callable[[Value], Hashable] | None = None
    convert: Callable[[Any], object] | None = None


TENSOR = Argument()


def choose(
    signature: Signature,
    spec: TensorSpec,
    takes: ArgumentType,
    cast: torch.dtype | None,
) -> Argument:
    """Return the kind of an input's argument; floating-point values are converted to `cast`.

    Raises:
        BindingError: the argument does not take the type of the input without loss.
    """
    is_strings = spec.dtype.torch is None
    _check(signature, spec, takes)
    # A TorchScript string holds bytes of any encoding.
    any_bytes = takes in _RAW or signature.torchscript
    refuse = _refuse_bytes if is_strings and not any_bytes else None
    if takes in _SCALARS:
        convert = _SCALARS[takes]
        return Argument(
            partial(_refuse_scalar, f"{signature.name}() takes {takes.value}", refuse),
            _first,
            lambda column: convert(_first(column)),
        )
    if is_strings:
        return Argument(refuse, convert=partial(_convert_strings, takes))
    dtype: torch.dtype = getattr(torch, str(spec.dtype.torch))
    if cast is None or not dtype.is_floating_point:
        return TENSOR
    return Argument(convert=lambda column: column.to(cast))


def _check(signature: Signature, spec: TensorSpec, takes: ArgumentType) -> None:
    """Raise BindingError if an argument does not take the type of its input without loss."""
    accepted = _ACCEPTED.get(takes, ("BYTES",))
    if takes is ArgumentType.TENSOR and (signature.torchscript or signature.leaves is not None):
        accepted = _NUMBERS
    if not spec.dtype.triton.startswith(accepted):
        raise BindingError(
            f"input '{spec.name}' is {spec.dtype.triton}, and {signature.name}() takes"
            f" {takes.value}",
            expected=f"{' or '.join(accepted)} in config.pbtxt",
        )


# Triton's types begin so.
_NUMBERS = ("BOOL", "INT", "UINT", "FP", "BF16")
_ACCEPTED: Mapping[ArgumentType, tuple[str, ...]] = {
    ArgumentType.INT: ("INT", "UINT"),
    ArgumentType.FLOAT: ("FP", "BF16", "INT", "UINT"),
    ArgumentType.BOOL: ("BOOL",),
    ArgumentType.VALUE: ("",),  # any type
    ArgumentType.TENSOR: ("",),
}


def for_rows(argument: Argument) -> Argument:
    """Return the kind of an argument of a function that is called with each row of a column.

    The function that converts a column returns a list: the argument for each row.
    """
    refuse, convert = argument.refuse, argument.convert

    def rows_of(column: Value) -> Sequence[object]:
        rows: Sequence[Any]
        if isinstance(column, Tensor):
            rows = column.unbind()
        else:
            rows = [column[row, ...] for row in range(column.shape[0])]
        return rows if convert is None else [convert(row) for row in rows]

    return Argument(partial(_refuse_rows, refuse) if refuse is not None else None, convert=rows_of)


# The types whose strings are passed as bytes, not decoded.
_RAW = (ArgumentType.RAW, ArgumentType.BYTES, ArgumentType.NESTED_BYTES)


def _refuse_bytes(value: Value) -> Refusal | None:
    """Refuse strings that are not UTF-8; states are decoded already."""
    try:  # all at once, apart from each other
        texts = [text for text in _flat(value) if isinstance(text, bytes)]
        b"\n".join(texts).decode()
    except UnicodeDecodeError as error:
        return f"is not UTF-8: {error.reason}", ""
    return None


def _decode(text: Any) -> str | bytes:
    """Decode UTF-8; keep other bytes, which only TorchScript gets."""
    try:
        return text.decode() if isinstance(text, bytes) else str(text)
    except UnicodeDecodeError:
        return bytes(text)


def _convert_strings(takes: ArgumentType, column: Strings) -> object:
    """Return strings as a flat list, as LibTorch does, or in the shape of the column."""
    texts = _flat(column)
    if takes not in _RAW:
        try:
            texts = list(map(bytes.decode, texts))
        except (TypeError, UnicodeDecodeError):
            texts = list(map(_decode, texts))
    if takes in (ArgumentType.STRINGS, ArgumentType.BYTES):
        return texts
    shaped: Strings = np.empty(column.shape, dtype=np.object_)
    shaped.ravel()[:] = texts
    return shaped if takes is ArgumentType.TENSOR else shaped.tolist()


_SCALARS: Mapping[ArgumentType, Callable[[Any], object]] = {
    ArgumentType.INT: int,
    ArgumentType.FLOAT: float,
    ArgumentType.BOOL: bool,
    ArgumentType.STR: _decode,
    ArgumentType.RAW: lambda value: value if isinstance(value, bytes) else value.encode(),
    ArgumentType.VALUE: lambda value: _decode(value) if isinstance(value, bytes) else value,
}


def _refuse_scalar(
    expected: str,
    refuse: _Refuse | None,
    value: Value,
) -> Refusal | None:
    if refuse is not None and (refusal := refuse(value)) is not None:
        return refusal
    distinct = set(map(repr, _flat(value)))  # repr, because NaN does not equal itself
    if len(distinct) == 1:
        return None
    return f"holds {len(distinct)} values", f"one value for all rows: {expected}"


def _refuse_rows(refuse: _Refuse, value: Value) -> Refusal | None:
    for row in range(value.shape[0]):
        refusal = refuse(value[row, ...])
        if refusal is not None:
            return refusal
    return None


def _first(value: Value) -> Any:
    return _flat(value)[0]


def _flat(value: Value) -> list[Any]:
    return value.reshape(-1).tolist()
