from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engines import texts

from torch_py_backend.pipeline import differences

_INF, _NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.1, 1.0], [1.0, 1.0], 0.05),
        ([1e-4, 1.0, 1.0], [0.0, 1.0, 1.0], 1e-4),
        ([-1e9, 1.0, 1.5], [-1e9, 1.0, 1.0], 0.25),  # a mask
        ([_INF, 1.0], [_INF, 1.0], 0.0),
        ([_NAN, 1.0], [_NAN, 1.0], 0.0),
        ([0.5, 0.0], [0.0, 0.0], 0.5),
        ([], [], 0.0),
        ([1.0], [1.0, 2.0], _INF),
        ([_NAN, 1.0], [1.0, 1.0], _INF),
        ([_INF], [-_INF], _INF),
        ([1.0], [_NAN], _INF),
        ([_NAN], [_INF], _INF),
        # Of other types it is the share that differs.
        ([1, 2, 3, 4], [1, 2, 3, 9], 0.25),
        ([True], [False], 1.0),
        (texts("a", "b"), texts("a", "c"), 0.5),
    ],
)
def test_neither_small_nor_large_values_distort_the_error(
    actual: Any, expected: Any, error: float
) -> None:
    if isinstance(actual, list):
        actual, expected = torch.tensor(actual), torch.tensor(expected)
    assert differences.difference(actual, expected) == pytest.approx(error, rel=1e-3)
