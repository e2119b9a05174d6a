"""Columns of any values."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch

from torch_py_backend.values import objects


@pytest.mark.parametrize("values", [[torch.ones(2), {}], [[1, 2], np.ones(2), (1, 2)], []])
def test_objects(values: list[Any]) -> None:
    """A column contains any values unchanged; numpy does not convert them."""
    column = objects(values)
    assert column.shape == (len(values),)
    joined = np.concatenate([column, column[-1:]])
    assert all(map(operator.is_, joined.tolist(), values))
