"""How far an output is from a reference.

The error of an output is the largest |value - reference| / (|reference| + typical), where typical
is the median of |reference| without zeros. Neither values close to zero nor a mask of -1e9 distort
this measure. The error of integers, booleans and strings is the share of values that differ.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.batching.gather_scatter import Value
from torch_py_backend.errors import OutputError

# The largest error of a saved model, and in formats of 16 bits. Compilers reorder sums.
MAX_ERROR, MAX_ERROR_REDUCED = 1e-3, 3e-2
_REDUCED = (torch.float16, torch.bfloat16)


def tolerance(expected: Value) -> float:
    """Return the largest error of an output that is computed in another way."""
    is_reduced = isinstance(expected, Tensor) and expected.dtype in _REDUCED
    return MAX_ERROR_REDUCED if is_reduced else MAX_ERROR


def difference(model: str, name: str, actual: Value, expected: Value) -> float:
    """Return the error of an output.

    Raises:
        OutputError: it differs in shape, or has infinities or NaN in other places.
    """
    if actual.shape != expected.shape:
        raise OutputError(
            model,
            f"output '{name}' is {list(actual.shape)}",
            expected=f"{list(expected.shape)}, as in eager",
        )
    if 0 in expected.shape:
        return 0.0
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        pairs = zip(_encoded(actual), _encoded(expected), strict=True)
        return float(np.mean([text != wanted for text, wanted in pairs]))
    if not expected.is_floating_point():
        return (actual != expected).double().mean().item()
    actual, expected = actual.double(), expected.double()
    finite = expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if not torch.where(finite, actual.isfinite(), same).all():
        raise OutputError(
            model,
            f"output '{name}' has infinities or NaN in other places",
            expected="them where eager has them",
        )
    actual, expected = actual[finite], expected[finite]
    if not expected.numel():
        return 0.0
    return ((actual - expected).abs() / (expected.abs() + _typical(expected))).max().item()


def shares_beyond(error: float, actual: Tensor, expected: Tensor) -> list[float]:
    """Return the share of values with a larger error in each row of an output of this shape."""
    if 0 in expected.shape:
        return []
    actual, expected = actual.double(), expected.double()
    typical = _typical(expected[expected.isfinite()]).item()
    close = torch.isclose(actual, expected, rtol=error, atol=error * typical, equal_nan=True)
    return (~close).reshape(len(expected), -1).double().mean(1).tolist()


def _typical(expected: Tensor) -> Tensor:
    size = expected.abs()
    return size[size > 0].median() if size.any() else torch.tensor(1.0)


def _encoded(strings: Value) -> list[bytes]:
    return [text if isinstance(text, bytes) else text.encode() for text in np.ravel(strings)]
