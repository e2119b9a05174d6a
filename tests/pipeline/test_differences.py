"""The error of an output against a reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

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
    ],
)
def test_neither_small_nor_large_values_distort_the_error(
    actual: list[float], expected: list[float], error: float
) -> None:
    measured = differences.difference(torch.tensor(actual), torch.tensor(expected))
    assert measured == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 9]), 0.25),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (np.array(["a", "b"], dtype=object), np.array(["a", "c"], dtype=object), 0.5),
    ],
    ids=["integers", "booleans", "text"],
)
def test_the_error_of_other_types_is_the_share_that_differs(
    actual: Any, expected: Any, error: float
) -> None:
    assert differences.difference(actual, expected) == error
