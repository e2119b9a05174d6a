"""How far an output is from a reference.

The error of a value is |value - reference| / (|reference| + typical), where typical is the median
of |reference| without zeros. Neither values close to zero nor a mask of -1e9 distort this measure.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_py_backend.values import Item, Value

# The largest error of a module that runs in another way, and in formats of 16 bits.
_MAX_ERROR = 1e-3
_MAX_ERROR_REDUCED = 3e-2
# How far rounding changes most values of a row, and the share of values that may change more.
_MAX_ROUNDING, _MAX_SHARE = 0.1, 0.1
_REDUCED = (torch.float16, torch.bfloat16)


def disagreement(
    outputs: Item,
    expected: Item,
    *,
    reduced: bool = False,
) -> str:
    """Return which output is too far from the module's own, as a clause; empty: none.

    `reduced`: a part of the module is in a format of 16 bits.
    """
    for name, value in expected.items():
        is_reduced = reduced or (isinstance(value, Tensor) and value.dtype in _REDUCED)
        limit = _MAX_ERROR_REDUCED if is_reduced else _MAX_ERROR
        error = difference(outputs[name], value)
        if not error <= limit:
            return (
                f"output '{name}' differs from the module's own by {error:.2g}; expected at most"
                f" {limit:g}"
            )
    return ""


def difference(actual: Value, expected: Value) -> float:
    """Return the largest error of an output; infinite if its shape is another.

    That of integers, booleans and strings is the share of values that differ.
    """
    if actual.shape != expected.shape:
        return math.inf
    if 0 in expected.shape:
        return 0.0
    if isinstance(actual, Tensor) and isinstance(expected, Tensor) and expected.is_floating_point():
        return _errors(actual, expected).max().item()
    return torch.as_tensor(actual != expected).double().mean().item()


def differs(actual: Tensor, expected: Tensor) -> bool:
    """Return whether a row is another one, and not only rounded in another way.

    Kernels for other row counts, reduced precision and quantization make errors below 0.1 in most
    values; a few values, as of a mask or an order, may change completely.
    """
    if actual.shape != expected.shape or not expected.numel():
        return actual.shape != expected.shape
    large = _errors(actual, expected) > _MAX_ROUNDING
    return bool(large.double().mean() > _MAX_SHARE)


def _errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the error of each value; infinite for infinities and NaN in other places."""
    actual, expected = actual.double(), expected.double()
    size = expected.abs()
    known = size[size.isfinite() & (size > 0)]
    typical = known.median() if known.numel() else 1.0
    errors = (actual - expected).abs() / (size + typical)
    errors = errors.nan_to_num(math.inf, math.inf)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return torch.where(same, 0.0, errors)
