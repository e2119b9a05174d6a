"""Columns of any values, and the items of requests."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch

from torch_py_backend.values import RequestItem, like, objects, parameters


@pytest.mark.parametrize("values", [[torch.ones(2), {}], [[1, 2], np.ones(2), (1, 2)], []])
def test_objects(values: list[Any]) -> None:
    """A column contains any values unchanged; numpy does not convert them."""
    column = objects(values)
    assert column.shape == (len(values),)
    joined = np.concatenate([column, column[-1:]])
    assert all(map(operator.is_, joined.tolist(), values))


def test_what_a_request_has_stays_with_its_item() -> None:
    """Other values of an item keep the parameters of its request; a plain item has none."""
    item = RequestItem({"x": torch.ones(1)}, parameters={"top": 3})
    for other in (item | {"y": torch.ones(2)}, like(item, {"y": torch.ones(2)})):
        assert parameters(other) == {"top": 3}
    assert parameters({"x": torch.ones(1)}) == {}
