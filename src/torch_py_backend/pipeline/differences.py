"""How far an output is from a reference.

The error of an output is the largest |value - reference| / (|reference| + typical), where typical
is the median of |reference| without zeros. Neither values close to zero nor a mask of -1e9 distort
this measure. The error of integers, booleans and strings is the share of values that differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.errors import OutputError
from torch_py_backend.values import Value

# The largest error of a saved model, and in formats of 16 bits. Compilers reorder sums.
MAX_ERROR, MAX_ERROR_REDUCED = 1e-3, 3e-2
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


def error(name: str, actual: Value, expected: Value) -> float:
    """Return the error of an output, as `difference`; infinity where that raises."""
    try:
        return difference(name, actual, expected)
    except OutputError:
        return math.inf


def dependent_output(
    batch: Mapping[str, Tensor],
    first: Mapping[str, Tensor],
    last: Mapping[str, Tensor],
    *,
    limit: float | None = None,
    share: float = 0.0,
) -> tuple[str, float] | None:
    """Return the name and the error of an output whose rows depend on each other; None: no output.

    The first and the last row are compared: the first one of a recurrent model, or behind a causal
    mask, does not depend on the others. Outputs of other sizes are not compared, such as those of a
    model that pads to the longest row of a batch.

    Args:
        batch: outputs of a batch, of all rows or of the first and the last.
        first: outputs of the first row alone.
        last: outputs of the last row alone.
        limit: the largest error of a value; by default `tolerance`.
        share: the largest share of a row's values with a larger error.
    """
    for name, value in batch.items():
        if any(name not in part or part[name].shape != value[:1].shape for part in (first, last)):
            continue
        alone, together = torch.cat([first[name], last[name]]), value[[0, -1]]
        beyond = _beyond(tolerance(value) if limit is None else limit, alone, together)
        if any(row.double().mean() > share for row in beyond if row.numel()):
            return name, error(name, alone, together)
    return None


def _beyond(limit: float, actual: Tensor, expected: Tensor) -> Tensor:
    """Return for each value whether its error is larger than the limit."""
    if not expected.is_floating_point():
        return actual != expected
    actual, expected = actual.double(), expected.double()
    finite = expected[expected.isfinite()]
    smallest = limit * _typical(finite).item()
    return ~torch.isclose(actual, expected, rtol=limit, atol=smallest, equal_nan=True)


def _typical(expected: Tensor) -> Tensor:
    size = expected.abs()
    return size[size > 0].median() if size.any() else torch.tensor(1.0)


def _encoded(strings: Value) -> list[bytes]:
    return [text if isinstance(text, bytes) else text.encode() for text in np.ravel(strings)]
