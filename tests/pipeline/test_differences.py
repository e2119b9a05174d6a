"""The error of an output against a reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_py_backend.errors import OutputError
from torch_py_backend.pipeline import differences

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
    measured = differences.difference("y", torch.tensor(actual), torch.tensor(expected))
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
    assert differences.difference("y", actual, expected) == error


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
        differences.difference("y", torch.tensor(actual), torch.tensor(expected))


_BATCH = torch.tensor([[1.0, 2.0], [9.0, 9.0], [3.0, 4.0]])


@pytest.mark.parametrize(
    ("batch", "first", "last", "found"),
    [
        (_BATCH, [[1.0, 2.0]], [[3.0, 4.0]], None),
        (_BATCH, [[1.0, 2.0]], [[3.0, 8.0]], 0.65),
        (_BATCH, [[1.0, _NAN]], [[3.0, 4.0]], _INF),
        (_BATCH, [[1.0, 2.0, 3.0]], [[3.0, 4.0, 5.0]], None),
        (_BATCH[:, 0], [1.0], [4.0], 1 / 4),
        (_BATCH.long(), [[1, 2]], [[3, 5]], 0.25),
        (torch.ones(3, 0), [[]], [[]], None),
    ],
    ids=["equal", "last", "nan", "sizes", "one value", "integers", "empty"],
)
def test_dependent_output(batch: Tensor, first: Any, last: Any, found: float | None) -> None:
    """The first and the last row are compared with the same rows alone."""
    alone = [{"y": torch.tensor(row, dtype=batch.dtype)} for row in (first, last)]
    dependent = differences.dependent_output({"y": batch}, alone[0], alone[1])
    assert (dependent is None) is (found is None)
    if dependent is not None:
        assert dependent[0] == "y"
        assert dependent[1] == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(("share", "is_dependent"), [(0.5, False), (0.4, True)])
def test_share_of_a_row(share: float, is_dependent: bool) -> None:
    """A share of a row's values may have a larger error."""
    first, last = {"y": torch.tensor([[1.0, 2.0]])}, {"y": torch.tensor([[3.0, 8.0]])}
    dependent = differences.dependent_output({"y": _BATCH}, first, last, limit=0.1, share=share)
    assert (dependent is not None) is is_dependent
