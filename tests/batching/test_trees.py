"""Map, copy and split trees of tensors."""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend.batching import trees
from torch_py_backend.errors import OutputError

_META = torch.device("meta")


class _Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class _Record:
    first: Any
    second: Any = None


class _Encoding(collections.UserDict[str, Any]):
    """Like transformers' BatchEncoding, whose items are also attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in vars(self).get("data", ()):
            raise AttributeError(name)
        return self.data[name]


@dataclasses.dataclass
class _Counted:
    first: Any
    count: int = dataclasses.field(init=False, default=3)


def _first(tree: Any) -> Any:
    """Return the only array or tensor in a tree."""
    while not isinstance(tree, Tensor | np.ndarray):
        tree = tree.first if hasattr(tree, "first") else tree[0]
    return tree


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(torch.ones(2), id="tensor"),
        pytest.param([(np.ones(2), "text")], id="array in a list"),
        pytest.param(_Pair(torch.ones(2), None), id="named tuple"),
        pytest.param(_Encoding({"first": torch.ones(2)}), id="dict of a class"),
        pytest.param(collections.defaultdict(None, {0: torch.ones(2)}), id="defaultdict"),
        pytest.param(_Counted(torch.ones(2)), id="field that is not given"),
    ],
)
def test_copies_keep_their_types(tree: Any) -> None:
    """A copy has the same class and shares no memory."""
    copy = trees.clone(tree)
    _first(tree)[:] = 5
    assert type(copy) is type(tree)
    assert _first(copy).tolist() == [1, 1]


def test_uncopyable_objects_stay_the_same() -> None:
    """An object that refuses to be copied is passed on unchanged."""

    class Stubborn(dict[str, Any]):
        def __deepcopy__(self, _: Any) -> Any:
            raise TypeError("no")

    tree = Stubborn(lock=threading.Lock())
    assert trees.clone(tree) is tree


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param({"a": [torch.zeros(2)], "b": (torch.zeros(1),)}, id="dict"),
        pytest.param(_Pair(torch.zeros(2), None), id="named-tuple"),
        pytest.param(_Record(torch.zeros(2), 1.5), id="dataclass"),
    ],
)
def test_sent(tree: Any) -> None:
    """Each tensor is moved to the device, in a tree of the same type."""
    moved = trees.to_device(tree, _META)
    assert type(moved) is type(tree)
    assert moved is not tree
    leaves, _ = pytree.tree_flatten(vars(moved) if dataclasses.is_dataclass(moved) else moved)
    assert {leaf.device for leaf in leaves if isinstance(leaf, Tensor)} == {_META}
    assert trees.to_device(tree, torch.device("cpu")) is tree


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        pytest.param(np.array([1, 2]), [1, 2], id="array"),
        pytest.param("all", ["all", "all"], id="for-each"),
        pytest.param(np.array(3), [3, 3], id="no-dimension"),
        pytest.param(
            {"a": ["x", "y"], "b": 0}, [{"a": "x", "b": 0}, {"a": "y", "b": 0}], id="dict"
        ),
        pytest.param((["x", "y"], None), [("x", None), ("y", None)], id="tuple"),
        pytest.param(_Pair(["x", "y"], 1), [_Pair("x", 1), _Pair("y", 1)], id="named-tuple"),
        pytest.param(_Record(["x", "y"]), [_Record("x"), _Record("y")], id="dataclass"),
    ],
)
def test_split(result: Any, expected: list[Any]) -> None:
    """Each of two rows gets its part."""
    assert trees.split("net", result, 2) == expected


@pytest.mark.parametrize(
    ("result", "part"),
    [
        pytest.param(torch.zeros(3, 2), r"a Tensor \[3, 2\]", id="tensor"),
        pytest.param(["a"], "a list of 1", id="list"),
        pytest.param({"a": (np.zeros(4),)}, r"an ndarray \[4\]", id="inside"),
    ],
)
def test_rows_that_differ(result: Any, part: str) -> None:
    """A part without an entry for each row is an error that names it."""
    with pytest.raises(OutputError, match=f"the result for 2 rows holds {part}"):
        trees.split("net", result, 2)
