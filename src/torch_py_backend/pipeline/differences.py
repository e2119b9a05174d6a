"""How far an output is from a reference.

The error of an output is the largest |value - reference| / (|reference| + typical), where typical
is the median of |reference| without zeros. Neither values close to zero nor a mask of -1e9 distort
this measure. The error of integers, booleans and strings is the share of values that differ.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.errors import OutputError
from torch_py_backend.values import Value

# The largest error of a saved model, and in formats of 16 bits. Compilers reorder sums.
MAX_ERROR, MAX_ERROR_REDUCED = 1e-3, 3e-2
# How far rounding changes most values of a row, and the share of values that may change more.
_MAX_ROUNDING, _MAX_SHARE = 0.1, 0.1
_REDUCED = (torch.float16, torch.bfloat16)


def tolerance(expected: Value) -> float:
    """Return the largest error of an output that is computed in another way."""
    is_reduced = isinstance(expected, Tensor) and expected.dtype in _REDUCED
    return MAX_ERROR_REDUCED if is_reduced else MAX_ERROR


def difference(name: str, actual: Value, expected: Value) -> float:
    """Return the error of an output.

    Raises:
        OutputError: it differs in shape, or has infinities or NaN in other places.
    """
    if actual.shape != expected.shape:
        raise OutputError(
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
            f"output '{name}' has infinities or NaN in other places",
            expected="them where eager has them",
        )
    actual, expected = actual[finite], expected[finite]
    if not expected.numel():
        return 0.0
    return ((actual - expected).abs() / (expected.abs() + _typical(expected))).max().item()


def dependent_output(
    batch: Mapping[str, Tensor], first: Mapping[str, Tensor], last: Mapping[str, Tensor]
) -> str | None:
    """Return the name of an output whose rows depend on each other; None: no output.

    The first and the last row are compared: the first one of a recurrent model, or behind a causal
    mask, does not depend on the others. Outputs of other sizes are not compared, such as those of a
    model that pads to the longest row of a batch.

    Args:
        batch: outputs of a batch, of all rows or of the first and the last.
        first: outputs of the first row alone.
        last: outputs of the last row alone.
    """
    for name, value in batch.items():
        if any(name not in part or part[name].shape != value[:1].shape for part in (first, last)):
            continue
        alone = torch.cat([first[name], last[name]])
        if any(map(differs, alone, value[[0, -1]])):
            return name
    return None


def differs(actual: Tensor, expected: Tensor) -> bool:
    """Return whether a row is another one, and not only rounded in another way.

    Kernels for other row counts, reduced precision and quantization make errors below 0.1 in most
    values; a few values, as of a mask or an order, may change completely.
    """
    if actual.shape != expected.shape or not expected.numel():
        return actual.shape != expected.shape
    actual, expected = actual.double(), expected.double()
    smallest = _MAX_ROUNDING * _typical(expected[expected.isfinite()]).item()
    close = torch.isclose(actual, expected, rtol=_MAX_ROUNDING, atol=smallest, equal_nan=True)
    return bool((~close).double().mean() > _MAX_SHARE)


def _typical(expected: Tensor) -> Tensor:
    size = expected.abs()
    return size[size > 0].median() if size.any() else torch.tensor(1.0)


def _encoded(strings: Value) -> list[bytes]:
    return [text if isinstance(text, bytes) else text.encode() for text in np.ravel(strings)]
