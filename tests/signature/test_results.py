"""Binding of output names to the leaves of forward()'s result."""

import collections
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import build
import numpy as np
import pytest
import torch

from torch_py_backend.errors import BindingError, LoadError
from torch_py_backend.signature import results


class Pair(NamedTuple):
    mean: int
    deviation: int


@dataclasses.dataclass
class Record:
    mean: int
    deviation: int


class ModelOutput(collections.OrderedDict[str, Any]):
    """A mapping that is also an object with attributes, as in Hugging Face's transformers."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


TENSOR = torch.ones(2)
RESULTS = {
    "tuple": (10, 20),
    "list": [10, 20],
    "dict": {"mean": 10, "deviation": 20},
    "named tuple": Pair(10, 20),
    "dataclass": Record(10, 20),
    "OrderedDict": ModelOutput(mean=10, deviation=20),
}
NAMED = ["dict", "named tuple", "dataclass", "OrderedDict"]


def taken(result: Any, names: Sequence[str]) -> list[Any]:
    return list(results.bind_outputs(build.MODEL, names, result)(result))


@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.parametrize(
    ("names", "parts"),
    [
        pytest.param(["OUTPUT__0", "OUTPUT__1"], [10, 20], id="numbers"),
        pytest.param(["OUTPUT__1", "OUTPUT__0"], [20, 10], id="numbers reversed"),
        pytest.param(["o__1"], [20], id="subset by number"),
        pytest.param(["first", "second"], [10, 20], id="order"),
        pytest.param(["first"], [10], id="subset by order"),
    ],
)
def test_numbers(kind: str, names: list[str], parts: list[int]) -> None:
    """Numbers and the config's order work for every type of result."""
    assert taken(RESULTS[kind], names) == parts


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize(
    ("names", "parts"),
    [
        pytest.param(["mean", "deviation"], [10, 20], id="all"),
        pytest.param(["deviation", "mean"], [20, 10], id="reversed"),
        pytest.param(["deviation"], [20], id="subset"),
    ],
)
def test_keys_and_fields(kind: str, names: list[str], parts: list[int]) -> None:
    """Keys and fields are names of outputs, in any order."""
    assert taken(RESULTS[kind], names) == parts


@pytest.mark.parametrize("name", ["y", "OUTPUT__0", "result"])
def test_tensor_is_the_only_output(name: str) -> None:
    """A result that is one tensor is the only output, with any name."""
    assert taken(TENSOR, [name]) == [TENSOR]


@pytest.mark.parametrize("result", [(TENSOR,), [TENSOR], {"y": TENSOR}, {"z": TENSOR}], ids=repr)
def test_single_part(result: Any) -> None:
    """For a result with one part, the output is the part, not its container."""
    (part,) = taken(result, ["y"])

    assert part is TENSOR


@pytest.mark.parametrize(
    "names", [["o__1", "a"], ["a", "o__0"], ["a__b__1", "a__b__0"]], ids=lambda names: names[0]
)
def test_mixed_numbers(names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """If not all names are numbers, outputs without names are bound in the config's order."""
    assert taken((10, 20), names) == [10, 20]
    warned = "are not all numbers" in caplog.text
    assert warned is (names[0] != "a__b__1")


def test_name_before_number() -> None:
    """A key has precedence over the number of another part."""
    result = {"o__1": 10, "o__0": 20}

    assert taken(result, ["o__0", "o__1"]) == [20, 10]


def test_integer_keys() -> None:
    """Keys that are integers are names of outputs."""
    assert taken({7: 10, 5: 20}, ["5", "7"]) == [20, 10]


def test_later_results() -> None:
    """A binding applies to later results."""
    outputs = results.bind_outputs(build.MODEL, ["deviation"], RESULTS["dict"])

    assert list(outputs({"other": 0, "deviation": 3, "mean": 4})) == [3]
    with pytest.raises(LookupError):
        outputs({"mean": 4})


@pytest.mark.parametrize(
    ("names", "kind", "warned"),
    [
        pytest.param(["a", "b"], "tuple", False, id="tuple"),
        pytest.param(["a", "b"], "dict", True, id="dict by order"),
        pytest.param(["mean"], "dict", False, id="dict by name"),
        pytest.param(["o__1"], "dict", False, id="dict by number"),
        pytest.param(["a", "b"], "named tuple", True, id="named tuple by order"),
    ],
)
def test_ignored_names(
    names: list[str], kind: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """If no name matches a result with names, one warning says that the order is used."""
    results.bind_outputs(build.MODEL, names, RESULTS[kind])

    assert [record.levelno for record in caplog.records] == [logging.WARNING] * warned
    if warned:
        assert "'digits'" in caplog.text
        assert "mean, deviation" in caplog.text


@pytest.mark.parametrize(
    ("result", "names", "said"),
    [
        pytest.param(
            TENSOR,
            ["y", "z"],
            ["the outputs y, z", "one Tensor", "names among RESULT, OUTPUT__0."],
            id="two of a tensor",
        ),
        pytest.param(TENSOR, ["o__1"], ["the outputs o__1", "one Tensor"], id="tensor's second"),
        pytest.param(None, ["y", "z"], ["one NoneType"], id="None"),
        pytest.param((), ["y"], ["tuple of 0"], id="empty tuple"),
        pytest.param({}, ["y"], ["dict"], id="empty dict"),
        pytest.param(
            RESULTS["tuple"],
            ["a", "b", "c"],
            ["tuple of 2", "names among RESULT[0], RESULT[1], OUTPUT__0, OUTPUT__1."],
            id="too many",
        ),
        pytest.param(RESULTS["list"], ["o__0", "o__2"], ["list of 2"], id="number out of range"),
        pytest.param(RESULTS["tuple"], ["a__0", "b__0"], ["a__0, b__0"], id="number twice"),
        pytest.param(RESULTS["dict"], ["o__0", "b"], ["o__0, b"], id="number and unknown"),
        pytest.param(
            RESULTS["dict"],
            ["mean", "variance"],
            [
                "the outputs mean, variance do not fit",
                "dict with mean, deviation",
                "names among mean, deviation, RESULT[mean], RESULT[deviation], OUTPUT__0,",
            ],
            id="one unknown key",
        ),
        pytest.param(
            RESULTS["dict"], ["deviation", "o__1"], ["deviation, o__1"], id="key and its number"
        ),
        pytest.param(
            RESULTS["dict"], ["mean", "RESULT[mean]"], ["mean, RESULT[mean]"], id="key and its path"
        ),
        pytest.param(
            RESULTS["dataclass"],
            ["mean", "variance"],
            ["Record with mean, deviation"],
            id="unknown field",
        ),
        pytest.param(
            RESULTS["named tuple"],
            ["a", "b", "c"],
            ["Pair with mean, deviation"],
            id="too many fields",
        ),
        pytest.param(RESULTS["dict"], ["mean", "mean"], ["the outputs mean, mean"], id="key twice"),
    ],
)
def test_unknown_names(result: Any, names: list[str], said: list[str]) -> None:
    """Names that the result does not have are rejected; the error lists its names."""
    with pytest.raises(BindingError) as raised:
        results.bind_outputs(build.MODEL, names, result)

    assert str(raised.value).startswith("model 'digits': the outputs ")
    assert all(part in str(raised.value) for part in said)


# --- nested results --------------------------------------------------------------------------


@dataclasses.dataclass
class Detected:
    boxes: Any
    extra: Any


NESTED = {"total": 1, "parts": (2, [3, 4]), "more": {"a": 5, 7: 6}}


@pytest.mark.parametrize(
    ("result", "names", "parts"),
    [
        pytest.param(NESTED, ["RESULT[parts][1][0]", "total"], [3, 1], id="path and key"),
        pytest.param(NESTED, ["RESULT[more][a]", "RESULT[more][7]"], [5, 6], id="keys in a path"),
        pytest.param(NESTED, ["o__0", "o__5", "o__2"], [1, 6, 3], id="numbers count leaves"),
        pytest.param(NESTED, ["o__1", "RESULT[total]"], [2, 1], id="number and path"),
        pytest.param(NESTED, ["a", "b", "c"], [1, 2, 3], id="order of leaves"),
        pytest.param((1, [2, (3,)]), ["RESULT[1][1][0]", "RESULT[0]"], [3, 1], id="in a tuple"),
        pytest.param((1, [2, (3,)]), ["o__2"], [3], id="number in a tuple"),
        pytest.param((10, 20), ["RESULT[1]", "RESULT[0]"], [20, 10], id="paths reversed"),
        pytest.param((10, 20), ["RESULT[1]"], [20], id="subset by path"),
        pytest.param([[10], 20], ["RESULT[0][0]", "RESULT[1]"], [10, 20], id="list in a list"),
        pytest.param(TENSOR, ["RESULT"], [TENSOR], id="whole"),
        pytest.param(
            Detected(1, {"masks": [2, 3]}),
            ["RESULT[extra][masks][1]", "boxes"],
            [3, 1],
            id="dataclass",
        ),
        pytest.param(
            Detected(1, 2), ["RESULT[extra]", "RESULT[boxes]"], [2, 1], id="path to a field"
        ),
        pytest.param({"pair": Pair(1, 2)}, ["RESULT[pair][1]"], [2], id="named tuple within"),
        pytest.param(
            {"pair": Pair(1, 2)},
            ["RESULT[pair][deviation]"],
            [2],
            id="field of a named tuple within",
        ),
        pytest.param(
            Pair(1, 2),
            ["RESULT[deviation]"],
            [2],
            id="path to a field of a named tuple",
        ),
        pytest.param(Pair(1, 2), ["RESULT[1]"], [2], id="path to an item of a named tuple"),
        pytest.param((1, None, 2), ["o__2", "o__0"], [2, 1], id="None counts"),
        pytest.param({"a": 1, "b": None}, ["a"], [1], id="None beside it"),
        pytest.param({"RESULT": 1, "b": 2}, ["RESULT"], [1], id="key that reads like a path"),
        pytest.param({"RESULT[b]": 1, "b": 2}, ["RESULT[b]"], [1], id="key before path"),
    ],
)
def test_leaves_of_a_nested_result(result: Any, names: list[str], parts: list[Any]) -> None:
    """Keys, fields, paths and numbers select leaves at any depth."""
    assert taken(result, names) == parts


def test_fields_of_torch_return_types() -> None:
    """Return types such as that of torch.max have fields."""
    result = torch.max(torch.tensor([[1.0, 3.0, 2.0]]), dim=1)

    indices, values = taken(result, ["indices", "values"])

    assert (values.item(), indices.item()) == (3.0, 1)


def test_path_in_torch_return_types() -> None:
    """Paths select items of the result of torch.sort in another result."""
    (indices,) = taken({"sorted": torch.sort(torch.tensor([2.0, 1.0]))}, ["RESULT[sorted][1]"])

    assert indices.tolist() == [1, 0]


TEXTS = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("result", "names", "parts"),
    [
        pytest.param(TEXTS, ["y"], [TEXTS], id="list"),
        pytest.param([b"a", b"\xff"], ["OUTPUT__0"], [[b"a", b"\xff"]], id="bytes"),
        pytest.param(("a", "b"), ["y"], [("a", "b")], id="tuple"),
        pytest.param([["a"], ["b"]], ["y"], [[["a"], ["b"]]], id="lists in a list"),
        pytest.param("text", ["y"], ["text"], id="one string"),
        pytest.param({"t": TEXTS, "n": 1}, ["n", "t"], [1, TEXTS], id="in a dict"),
        pytest.param((1, TEXTS), ["OUTPUT__1"], [TEXTS], id="beside a tensor"),
        pytest.param((1, TEXTS), ["RESULT[1]", "RESULT[0]"], [TEXTS, 1], id="by path"),
        pytest.param((["a", 1], 2), ["o__0", "o__1"], ["a", 1], id="mixed list has parts"),
        pytest.param(
            (["a"], ["b"]),
            ["OUTPUT__0", "OUTPUT__1"],
            [["a"], ["b"]],
            id="two lists of strings",
        ),
        pytest.param(
            (["a"], ["b"]),
            ["RESULT[1]"],
            [["b"]],
            id="second list of strings",
        ),
    ],
)
def test_strings_are_one_leaf(result: Any, names: list[str], parts: list[Any]) -> None:
    """A list of strings is one output."""
    assert taken(result, names) == parts


def test_array_of_strings_is_one_leaf() -> None:
    """A numpy array of strings is one output."""
    array = np.array([["a", "b"]], dtype=np.object_)

    assert taken((array, 1), ["OUTPUT__0"])[0] is array


@pytest.mark.parametrize(
    ("result", "names", "said"),
    [
        pytest.param(
            NESTED,
            ["parts"],
            ["the outputs parts do not fit", "names among total, RESULT[total], RESULT[parts][0],"],
            id="key of a branch",
        ),
        pytest.param(
            NESTED,
            ["total", "parts"],
            ["the outputs total, parts", "names among total, RESULT[total], RESULT[parts][0],"],
            id="key of a branch beside a leaf",
        ),
        pytest.param(NESTED, ["total", "RESULT[parts]"], ["RESULT[parts]"], id="path of a branch"),
        pytest.param(
            NESTED,
            ["total", "RESULT[parts][2]"],
            ["dict with total, parts, more", "RESULT[parts][1][0]"],
            id="path that leads nowhere",
        ),
        pytest.param(NESTED, ["total", "RESULT[2]"], ["RESULT[2]"], id="number of a key"),
        pytest.param((1, 2), ["RESULT[0]", "o__0"], ["RESULT[0], o__0"], id="path and its number"),
        pytest.param((1, 2), ["RESULT[0]", "b"], ["RESULT[0], b"], id="path and unknown"),
        pytest.param(TENSOR, ["o__0", "y"], ["one Tensor"], id="tensor twice"),
        pytest.param(TEXTS, ["a", "b", "c"], ["one list", "RESULT, OUTPUT__0"], id="strings apart"),
        pytest.param(
            Detected(1, 2), ["boxes", "scores"], ["Detected with boxes, extra"], id="unknown field"
        ),
    ],
)
def test_invalid_names(result: Any, names: list[str], said: list[str]) -> None:
    """Each name selects one leaf, and no two names the same one; the error lists the leaves."""
    with pytest.raises(BindingError) as raised:
        results.bind_outputs(build.MODEL, names, result)

    assert isinstance(raised.value, LoadError)
    assert str(raised.value).startswith("model 'digits': the outputs ")
    assert all(part in str(raised.value) for part in said)


@pytest.mark.parametrize(
    "name", ["RESULT[5]", "RESULT[x]", "RESULT[0][0]"], ids=["number", "key", "too deep"]
)
def test_invalid_path(name: str) -> None:
    """An invalid path is an error; it is not bound in the config's order."""
    with pytest.raises(BindingError):
        results.bind_outputs(build.MODEL, [name], (1, 2))


@pytest.mark.parametrize(
    "later",
    [
        pytest.param((1, 2, 3), id="longer tuple"),
        pytest.param((1,), id="shorter tuple"),
        pytest.param({"x": 1, "y": 2}, id="dict"),
        pytest.param(torch.ones(2, 3), id="tensor of two rows"),
    ],
)
def test_result_of_another_structure(later: Any) -> None:
    """A later result of another structure raises."""
    outputs = results.bind_outputs(build.MODEL, ["a", "b"], (1, 2))

    with pytest.raises((LookupError, TypeError, AttributeError)):
        outputs(later)


@pytest.mark.parametrize(
    ("result", "names"),
    [
        pytest.param(TENSOR, ["OUTPUT__0"], id="tensor"),
        pytest.param((1, 2), ["OUTPUT__0", "OUTPUT__1"], id="tuple"),
        pytest.param(Pair(1, 2), ["mean", "deviation"], id="named tuple"),
        pytest.param(Detected(1, 2), ["boxes", "extra"], id="dataclass"),
        pytest.param({"a": 1, 5: 2}, ["a", "5"], id="dict"),
        pytest.param(
            NESTED,
            ["total", "OUTPUT__1", "OUTPUT__2", "OUTPUT__3", "OUTPUT__4", "OUTPUT__5"],
            id="nested",
        ),
        pytest.param((1, TEXTS), ["OUTPUT__0", "OUTPUT__1"], id="strings"),
    ],
)
def test_every_leaf_has_a_name(result: Any, names: list[str]) -> None:
    """names() returns a name for each leaf, which binds to it."""
    assert results.leaf_names(result) == names
    assert len(taken(result, names)) == len(names)
