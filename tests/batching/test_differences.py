"""The error of an output against a reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from torch_py_backend.batching import differences
from torch_py_backend.errors import OutputError

_INF, _NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.1, 1.0], [1.0, 1.0], 0.05),
        ([1e-4, 1.0, 1.0], [0.0, 1.0, 1.0], 1e-4),
        ([-1e9, 1.0, 1.5], [-1e9, 1.0, 1.0], 0.25),  # a mask
        ([_INF, 1.0], [_INF, 1.0], 0.0),
        ([_NAN, 1.0], [_NAN, 1.0], 0.0),
        ([0.5, 0.0], [0.0, 0.0], 0.5),
        ([], [], 0.0),
        ([_NAN], [_NAN], 0.0),
    ],
)
def test_difference(actual: list[float], expected: list[float], error: float) -> None:
    """Neither values close to zero nor large values distort the error."""
    measured = differences.difference("digits", "y", torch.tensor(actual), torch.tensor(expected))
    assert measured == pytest.approx(error, rel=1e-3)


def _strings(*values: str | bytes) -> Any:
    return np.array(values, dtype=object)


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 9]), 0.25),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (_strings("a", "ü"), _strings(b"a", "ü".encode()), 0.0),
        (_strings("a", "b"), _strings("a", "c"), 0.5),
    ],
    ids=["integers", "booleans", "bytes", "text"],
)
def test_share_that_differs(actual: Any, expected: Any, error: float) -> None:
    """The error of integers, booleans and strings is the share that differs."""
    assert differences.difference("digits", "y", actual, expected) == error


@pytest.mark.parametrize(
    ("actual", "expected", "says"),
    [
        ([1.0], [1.0, 2.0], r"is \[1\]; expected \[2\]"),
        ([_NAN, 1.0], [1.0, 1.0], "infinities or NaN"),
        ([_INF], [-_INF], "infinities or NaN"),
        ([1.0], [_NAN], "infinities or NaN"),
        ([_NAN], [_INF], "infinities or NaN"),
    ],
)
def test_outputs_that_cannot_be_compared(
    actual: list[float], expected: list[float], says: str
) -> None:
    """Another shape, or NaN in other places than eager, is refused."""
    with pytest.raises(OutputError, match=says):
        differences.difference("digits", "y", torch.tensor(actual), torch.tensor(expected))


def test_shares_of_rows_with_one_value() -> None:
    """An output may have no dimension but the rows."""
    actual, expected = torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0])
    assert differences.shares_beyond(0.1, actual, expected) == [0.0, 1.0]
