import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from torch_py_backend.errors import BindingError
from torch_py_backend.signature import results


class Pair(NamedTuple):
    mean: int
    deviation: int


@dataclasses.dataclass
class Record:
    mean: Any
    deviation: Any


TENSOR = torch.ones(2)
RESULTS = {
    "tuple": (10, 20),
    "list": [10, 20],
    "dict": {"mean": 10, "deviation": 20},
    "named tuple": Pair(10, 20),
    "dataclass": Record(10, 20),
}


NESTED = {"total": 1, "parts": (2, [3, 4]), "more": {"a": 5, 7: 6}}
TEXTS = ["a", "b", "c"]
ARRAY = np.array([["a", "b"]], dtype=np.object_)
MAXIMA = torch.max(torch.tensor([[1.0, 3.0, 2.0]]), dim=1)


def outputs(result: Any, names: Sequence[str]) -> list[Any]:
    return list(results.bind_outputs(names, result)(result))


@pytest.mark.parametrize("kind", RESULTS)
def test_numbers_keys_and_fields_select_parts_of_every_type(kind: str) -> None:
    assert outputs(RESULTS[kind], ["OUTPUT__1", "OUTPUT__0"]) == [20, 10]
    is_plain = kind in ("tuple", "list")
    names, expected = (["a", "b"], [10, 20]) if is_plain else (["deviation", "mean"], [20, 10])
    assert outputs(RESULTS[kind], names) == expected
    assert outputs(RESULTS[kind], names[:1]) == expected[:1]


@pytest.mark.parametrize(
    ("result", "names", "parts"),
    [
        # names
        (TENSOR, ["y"], [TENSOR]),
        (TENSOR, ["RESULT"], [TENSOR]),
        ({"o__1": 10, "o__0": 20}, ["o__0", "o__1"], [20, 10]),  # a key before a number
        ({7: 10, 5: 20}, ["5", "7"], [20, 10]),
        ({"RESULT": 1, "b": 2}, ["RESULT"], [1]),
        ({"RESULT[b]": 1, "b": 2}, ["RESULT[b]"], [1]),
        # paths
        (NESTED, ["RESULT[parts][1][0]", "total"], [3, 1]),
        ((1, [2, (3,)]), ["RESULT[1][1][0]", "RESULT[0]"], [3, 1]),
        (Record(1, {"masks": [2, 3]}), ["RESULT[deviation][masks][1]", "mean"], [3, 1]),
        (Pair(1, 2), ["RESULT[1]"], [2]),
        # numbers and order count leaves
        (NESTED, ["o__0", "o__5", "o__2"], [1, 6, 3]),
        (NESTED, ["o__1", "RESULT[total]"], [2, 1]),
        ((1, {"total": 2}), ["a", "b"], [1, 2]),
        # a list of strings is one leaf
        (TEXTS, ["y"], [TEXTS]),
        ([b"a", b"\xff"], ["OUTPUT__0"], [[b"a", b"\xff"]]),
        (("a", "b"), ["y"], [("a", "b")]),
        ([["a"], ["b"]], ["y"], [[["a"], ["b"]]]),
        ("text", ["y"], ["text"]),
        ((ARRAY, 1), ["OUTPUT__0"], [ARRAY]),
        (MAXIMA, ["indices", "values"], [MAXIMA.indices, MAXIMA.values]),
        ((1, TEXTS), ["RESULT[1]", "RESULT[0]"], [TEXTS, 1]),
        ((["a", 1], 2), ["o__0", "o__1"], ["a", 1]),
        ((["a"], ["b"]), ["OUTPUT__0", "OUTPUT__1"], [["a"], ["b"]]),
    ],
)
def test_names_select_leaves_at_any_depth(result: Any, names: list[str], parts: list[Any]) -> None:
    assert outputs(result, names) == parts


def test_only_names_that_are_no_fields_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    for kind, names in (("tuple", ["a", "b"]), ("dict", ["o__1"]), ("tuple", ["a__b__1", "b__"])):
        assert len(outputs(RESULTS[kind], names)) == len(names)
    assert not caplog.messages
    for kind, names in (("named tuple", ["a", "b"]), ("tuple", ["o__1", "a"])):
        assert outputs(RESULTS[kind], names) == [10, 20]
        assert f"the output names {', '.join(names)} are no fields of the result" in caplog.text


@pytest.mark.parametrize(
    ("result", "names", "message"),
    [
        (TENSOR, ["o__1"], "the outputs o__1 do not fit what forward() returns, a Tensor"),
        (None, ["y", "z"], "a NoneType"),
        ((), ["y"], "a tuple"),
        (RESULTS["tuple"], list("abc"), "expected names among RESULT[0], RESULT[1], OUT"),
        (RESULTS["dict"], ["mean", "x"], "expected names among mean, deviation, RESULT[mean]"),
        (RESULTS["dict"], ["deviation", "o__1"], "deviation, o__1"),
        # nested
        (NESTED, ["parts"], "names among total, RESULT[total], RESULT[parts][0],"),
        (NESTED, ["total", "RESULT[parts]"], "RESULT[parts]"),
        (TEXTS, ["a", "b", "c"], "a list; expected names among RESULT, OUTPUT__0"),
        # an invalid path is not bound in the config's order
        ((1, 2), ["RESULT[0]", "b"], "RESULT[0], b"),
        *(((1, 2), [name], name) for name in ("RESULT[5]", "RESULT[x]", "RESULT[0][0]")),
    ],
)
def test_each_name_selects_one_leaf_of_its_own(result: Any, names: list[str], message: str) -> None:
    with pytest.raises(BindingError) as raised:
        results.bind_outputs(names, result)
    assert str(raised.value).startswith("the outputs ")
    assert message in str(raised.value)


def test_binding_applies_to_later_results() -> None:
    bound = results.bind_outputs(["deviation"], RESULTS["dict"])
    assert list(bound({"other": 0, "deviation": 3, "mean": 4})) == [3]
    with pytest.raises(LookupError):
        bound({"mean": 4})
    texts = results.bind_outputs(["y"], TEXTS)
    assert [*texts(["d"])] == [["d"]]  # one leaf, of any length
    second = results.bind_outputs(["RESULT[1]"], (1, 2))
    both = results.bind_outputs(["a", "b"], (1, 2))
    for bound, later in itertools.product((second, both), ((1,), {"x": 1}, torch.ones(2, 3))):
        with pytest.raises((LookupError, TypeError)):  # a tensor can be indexed, too
            bound(later)
