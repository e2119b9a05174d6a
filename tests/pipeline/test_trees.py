"""Map, copy and split trees of tensors."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend.errors import OutputError
from torch_py_backend.pipeline import trees

_META = torch.device("meta")


class _Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class _Record:
    first: Any
    second: Any = None


@pytest.mark.parametrize(
    "tree",
    [
        {"a": [torch.zeros(2)], "b": (torch.zeros(1),)},
        _Pair(torch.zeros(2), None),
        _Record(torch.zeros(2), 1.5),
    ],
)
def test_tensors_are_copied_or_moved_in_a_tree_of_the_same_type(tree: Any) -> None:
    copy = trees.clone(tree)
    assert type(copy) is type(tree)
    assert copy is not tree
    moved = trees.to_device(tree, _META)
    assert type(moved) is type(tree)
    assert moved is not tree
    leaves, _ = pytree.tree_flatten(vars(moved) if dataclasses.is_dataclass(moved) else moved)
    assert {leaf.device for leaf in leaves if isinstance(leaf, Tensor)} == {_META}
    assert trees.to_device(tree, torch.device("cpu")) is tree


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (np.array([1, 2]), [1, 2]),
        ("all", ["all", "all"]),
        (np.array(3), [3, 3]),
        ({"a": ["x", "y"], "b": 0}, [{"a": "x", "b": 0}, {"a": "y", "b": 0}]),
        ((["x", "y"], None), [("x", None), ("y", None)]),
        (_Pair(["x", "y"], 1), [_Pair("x", 1), _Pair("y", 1)]),
        (_Record(["x", "y"]), [_Record("x"), _Record("y")]),
    ],
)
def test_each_row_gets_its_part(result: Any, expected: list[Any]) -> None:
    assert trees.split(result, 2) == expected


@pytest.mark.parametrize(
    ("result", "part"),
    [
        pytest.param(torch.zeros(3, 2), r"a Tensor \[3, 2\]", id="tensor"),
        pytest.param(["a"], "a list of 1", id="list"),
        pytest.param({"a": (np.zeros(4),)}, r"an ndarray \[4\]", id="inside"),
    ],
)
def test_a_part_without_an_entry_for_each_row_is_refused(result: Any, part: str) -> None:
    with pytest.raises(OutputError, match=f"the result for 2 rows holds {part}"):
        trees.split(result, 2)
