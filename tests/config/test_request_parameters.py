"""The parameters of requests, from Triton's JSON to the rows of a batch."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch

from torch_py_backend.config import request_parameters


def test_parse() -> None:
    """Each value keeps its type; without JSON there are none."""
    text = '{"top": 3, "loud": true, "scale": 0.5, "name": "a\\"\\u00e9"}'
    values = request_parameters.parse(text)
    assert values == {"top": 3, "loud": True, "scale": 0.5, "name": 'a"é'}
    assert list(map(type, values.values())) == [int, bool, float, str]
    assert request_parameters.parse("") == {}


@pytest.mark.parametrize("values", [[torch.ones(2), {}], [[1, 2], np.ones(2), (1, 2)], []])
def test_column(values: list[Any]) -> None:
    """A column contains any values unchanged; numpy does not convert them."""
    column = request_parameters.column(values)
    assert column.shape == (len(values),)
    joined = np.concatenate([column, column[-1:]])
    assert all(map(operator.is_, request_parameters.values(joined), values))


def test_pop() -> None:
    """pop() removes the parameters from an item; the default is empty."""
    item = {"x": torch.ones(1), request_parameters.KEY: request_parameters.column([{"top": 3}])}
    assert request_parameters.pop(item) == {"top": 3}
    assert list(item) == ["x"]
    assert request_parameters.pop(item) == {}
