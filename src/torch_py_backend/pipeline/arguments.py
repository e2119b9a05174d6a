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

_Refuse: TypeAlias = "Callable[[Value], str | None]"


class Argument(NamedTuple):
    """How an argument is made of a column; what is None is not needed.

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
    """Return how an input's argument is made; floating-point values are converted to `cast`.

    Raises:
        BindingError: the argument does not take the type of the input without loss.
    """
    kind = _KINDS[takes]
    accepted = kind.accepts
    if takes is ArgumentType.TENSOR and (signature.torchscript or signature.leaves is not None):
        accepted = ("BOOL", "INT", "UINT", "FP", "BF16")
    if not spec.dtype.triton.startswith(accepted):
        raise BindingError(
            f"input '{spec.name}' is {spec.dtype.triton}, and {signature.name}() takes"
            f" {takes.value}",
            expected=f"{' or '.join(accepted)} in config.pbtxt",
        )
    refuse: _Refuse | None = None
    # A TorchScript string holds bytes of any encoding.
    if spec.dtype.torch is None and not (kind.raw or signature.torchscript):
        refuse = _refuse_bytes
    scalar = kind.scalar
    if scalar is not None:
        refuse = partial(_refuse_several, f"{signature.name}() takes {takes.value}", refuse)
        return Argument(refuse, _first, lambda column: scalar(_first(column)))
    if spec.dtype.torch is None:
        return Argument(refuse, convert=partial(_convert_strings, takes))
    dtype: torch.dtype = getattr(torch, spec.dtype.torch)
    if cast is None or not dtype.is_floating_point:
        return TENSOR
    return Argument(convert=lambda column: column.to(cast))


def for_rows(argument: Argument) -> Argument:
    """Return how the arguments of a function are made that is called with each row of a column.

    The function that converts a column returns a list: the argument for each row.
    """
    refuse, convert = argument.refuse, argument.convert

    def rows_of(column: Value) -> Sequence[Any]:
        if isinstance(column, Tensor):
            return column.unbind()
        return [column[row, ...] for row in range(column.shape[0])]

    def refuse_rows(value: Value) -> str | None:
        reasons = map(refuse, rows_of(value)) if refuse is not None else ()
        return next(filter(None, reasons), None)

    def convert_rows(column: Value) -> Sequence[object]:
        rows = rows_of(column)
        return rows if convert is None else list(map(convert, rows))

    return Argument(refuse_rows if refuse is not None else None, convert=convert_rows)


def _refuse_bytes(value: Value) -> str | None:
    """Refuse strings that are not UTF-8; states are decoded already."""
    try:  # all at once, apart from each other
        texts = [text for text in _flat(value) if isinstance(text, bytes)]
        b"\n".join(texts).decode()
    except UnicodeDecodeError as error:
        return f"is not UTF-8: {error.reason}"
    return None


def _refuse_several(
    expected: str,
    refuse: _Refuse | None,
    value: Value,
) -> str | None:
    reason = None if refuse is None else refuse(value)
    distinct = set(map(repr, _flat(value)))  # repr, because NaN does not equal itself
    if reason is not None or len(distinct) == 1:
        return reason
    return f"holds {len(distinct)} values; expected one value for all rows: {expected}"


def _decode(text: Any) -> str | bytes:
    """Decode UTF-8; keep other bytes, which only TorchScript gets."""
    try:
        return text.decode() if isinstance(text, bytes) else str(text)
    except UnicodeDecodeError:
        return bytes(text)


def _convert_strings(takes: ArgumentType, column: Strings) -> object:
    """Return strings as a flat list, as LibTorch does, or in the shape of the column."""
    texts = _flat(column)
    if not _KINDS[takes].raw:
        try:
            texts = list(map(bytes.decode, texts))
        except (TypeError, UnicodeDecodeError):
            texts = list(map(_decode, texts))
    if takes in (ArgumentType.STRINGS, ArgumentType.BYTES):
        return texts
    shaped: Strings = np.empty(column.shape, dtype=np.object_)
    shaped.ravel()[:] = texts
    return shaped if takes is ArgumentType.TENSOR else shaped.tolist()


def _first(value: Value) -> Any:
    return _flat(value)[0]


def _flat(value: Value) -> list[Any]:
    return value.reshape(-1).tolist()


class _Kind(NamedTuple):
    """A kind of argument.

    Attributes:
        accepts: how the names of Triton's types begin that it takes.
        scalar: makes the argument of one value; None: it gets all values.
        raw: its strings are passed as bytes, not decoded.
    """

    accepts: tuple[str, ...] = ("BYTES",)
    scalar: Callable[[Any], object] | None = None
    raw: bool = False


# Parts of containers are tensors.
_KINDS: Mapping[ArgumentType, _Kind] = {
    ArgumentType.TENSOR: _Kind(("",)),  # any type
    ArgumentType.VALUE: _Kind(
        ("",), lambda value: _decode(value) if isinstance(value, bytes) else value
    ),
    ArgumentType.INT: _Kind(("INT", "UINT"), int),
    ArgumentType.FLOAT: _Kind(("FP", "BF16", "INT", "UINT"), float),
    ArgumentType.BOOL: _Kind(("BOOL",), bool),
    ArgumentType.STR: _Kind(scalar=_decode),
    ArgumentType.RAW: _Kind(
        scalar=lambda value: value if isinstance(value, bytes) else value.encode(), raw=True
    ),
    ArgumentType.STRINGS: _Kind(),
    ArgumentType.BYTES: _Kind(raw=True),
    ArgumentType.NESTED_STRINGS: _Kind(),
    ArgumentType.NESTED_BYTES: _Kind(raw=True),
}
