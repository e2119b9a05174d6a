import collections
import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import build
import pytest
import torch

from torch_py_backend import binding
from torch_py_backend.binding import Argument, Passing
from torch_py_backend.errors import BindingError, LoadError

KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: Passing.POSITIONAL,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: Passing.POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY: Passing.KEYWORD,
    inspect.Parameter.VAR_POSITIONAL: Passing.REST,
    inspect.Parameter.VAR_KEYWORD: Passing.REST_BY_NAME,
}


def arguments(forward: Callable[..., Any]) -> list[Argument]:
    return [
        Argument(
            name=one.name,
            required=one.default is one.empty
            and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD),
            passing=KINDS[one.kind],
            takes_dict=one.annotation is dict,
            text=str(one),
        )
        for one in inspect.signature(forward).parameters.values()
    ]


def called(forward: Callable[..., Any], names: Sequence[str]) -> Any:
    """What forward() gets, when each column is its tensor's name."""
    inputs = binding.bind_inputs(build.MODEL, names, arguments(forward))
    assert sorted(inputs.names) == sorted(names)
    return inputs.call(forward, inputs.names)


def two(x: Any, y: Any) -> Any:
    return {"x": x, "y": y}


def defaults(x: Any, y: Any = None, z: Any = None) -> Any:
    return {"x": x, "y": y, "z": z}


def keyword_only(x: Any, *, y: Any, z: Any = None) -> Any:
    return {"x": x, "y": y, "z": z}


def positional_only(x: Any, y: Any, /) -> Any:
    return {"x": x, "y": y}


def many(*tensors: Any) -> Any:
    return tensors


def one_and_many(x: Any, *others: Any) -> Any:
    return {"x": x, "others": others}


def gap_and_many(x: Any, y: Any = None, *others: Any) -> Any:
    return {"x": x, "y": y, "others": others}


def any_name(**tensors: Any) -> Any:
    return tensors


def one_and_any_name(x: Any, **others: Any) -> Any:
    return {"x": x, "others": others}


def everything(x: Any, *others: Any, y: Any = None, **more: Any) -> Any:
    return {"x": x, "others": others, "y": y, "more": more}


def stars(x: Any, *others: Any, y: Any, **more: Any) -> Any:
    return {"x": x, "others": others, "y": y, "more": more}


def takes_dict(tensors: dict) -> Any:  # type: ignore[type-arg]
    return tensors


def numbered(a__1: Any, b__0: Any) -> Any:
    return {"a__1": a__1, "b__0": b__0}


@pytest.mark.parametrize(
    ("forward", "names", "received"),
    [
        # by name
        pytest.param(two, ["x", "y"], {"x": "x", "y": "y"}, id="names"),
        pytest.param(two, ["y", "x"], {"x": "x", "y": "y"}, id="names in another order"),
        pytest.param(defaults, ["x"], {"x": "x", "y": None, "z": None}, id="defaults left out"),
        pytest.param(defaults, ["z", "x"], {"x": "x", "y": None, "z": "z"}, id="gap at a default"),
        pytest.param(defaults, ["z", "y", "x"], {"x": "x", "y": "y", "z": "z"}, id="all of three"),
        pytest.param(keyword_only, ["y", "x"], {"x": "x", "y": "y", "z": None}, id="keyword-only"),
        pytest.param(
            keyword_only, ["z", "x", "y"], {"x": "x", "y": "y", "z": "z"}, id="keyword-only default"
        ),
        pytest.param(positional_only, ["y", "x"], {"x": "x", "y": "y"}, id="positional-only"),
        pytest.param(any_name, ["b", "a-c"], {"a-c": "a-c", "b": "b"}, id="**"),
        pytest.param(any_name, ["a__1", "a__0"], {"a__0": "a__0", "a__1": "a__1"}, id="** numbers"),
        pytest.param(
            one_and_any_name, ["b", "x"], {"x": "x", "others": {"b": "b"}}, id="name and **"
        ),
        pytest.param(
            everything,
            ["w", "y", "x"],
            {"x": "x", "others": (), "y": "y", "more": {"w": "w"}},
            id="everything by name",
        ),
        pytest.param(
            numbered, ["a__1", "b__0"], {"a__1": "a__1", "b__0": "b__0"}, id="names before numbers"
        ),
        pytest.param(
            stars,
            ["z", "y", "x"],
            {"x": "x", "others": (), "y": "y", "more": {"z": "z"}},
            id="stars by name",
        ),
        # by number
        pytest.param(two, ["i__0", "i__1"], {"x": "i__0", "y": "i__1"}, id="numbers"),
        pytest.param(two, ["i__1", "i__0"], {"x": "i__0", "y": "i__1"}, id="numbers reversed"),
        pytest.param(two, ["a__1", "b__0"], {"x": "b__0", "y": "a__1"}, id="numbers of any stem"),
        pytest.param(two, ["a__0__1", "b__00"], {"x": "b__00", "y": "a__0__1"}, id="last number"),
        pytest.param(
            defaults, ["i__2", "i__0"], {"x": "i__0", "y": None, "z": "i__2"}, id="numbers, gap"
        ),
        pytest.param(many, ["i__0", "i__1"], ("i__0", "i__1"), id="* numbers"),
        pytest.param(many, ["i__1", "i__0"], ("i__0", "i__1"), id="* numbers reversed"),
        pytest.param(
            many,
            [f"i__{number}" for number in reversed(range(12))],
            tuple(f"i__{number}" for number in range(12)),
            id="* twelve numbers reversed",
        ),
        pytest.param(
            one_and_many,
            ["i__2", "i__0", "i__1"],
            {"x": "i__0", "others": ("i__1", "i__2")},
            id="one and * numbers",
        ),
        pytest.param(
            gap_and_many,
            ["i__1", "i__2", "i__0"],
            {"x": "i__0", "y": "i__1", "others": ("i__2",)},
            id="default and * numbers",
        ),
        pytest.param(
            one_and_any_name, ["INPUT__0"], {"x": "INPUT__0", "others": {}}, id="number with **"
        ),
        # by the config's order
        pytest.param(two, ["image", "mask"], {"x": "image", "y": "mask"}, id="order"),
        pytest.param(
            defaults, ["image"], {"x": "image", "y": None, "z": None}, id="order, defaults"
        ),
        pytest.param(many, ["b", "a", "c"], ("b", "a", "c"), id="* order"),
        pytest.param(many, ["tensors"], ("tensors",), id="* order, its own name"),
        pytest.param(one_and_many, ["b", "a"], {"x": "b", "others": ("a",)}, id="one and * order"),
        # all in one
        pytest.param(takes_dict, ["b", "a"], {"a": "a", "b": "b"}, id="dict"),
        pytest.param(takes_dict, ["i__1"], {"i__1": "i__1"}, id="dict numbers"),
        pytest.param(takes_dict, ["tensors"], {"tensors": "tensors"}, id="dict of its own name"),
    ],
)
def test_each_argument_gets_its_tensor(
    forward: Callable[..., Any], names: list[str], received: Any
) -> None:
    """Names lead to arguments by name, else by number, else by the config's order."""
    assert called(forward, names) == received


@pytest.mark.parametrize(
    ("names", "warned"),
    [
        pytest.param(["x", "y"], False, id="names"),
        pytest.param(["i__1", "i__0"], False, id="numbers"),
        pytest.param(["image", "mask"], True, id="order"),
    ],
)
def test_only_the_configs_order_is_warned_about(
    names: list[str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Where only the order ties inputs to arguments, one line says so, with both sides."""
    binding.bind_inputs(build.MODEL, names, arguments(two))

    assert [record.levelno for record in caplog.records] == [logging.WARNING] * warned
    if warned:
        (message,) = caplog.messages
        assert "'digits'" in message
        assert "image, mask" in message
        assert "forward(x: Any, y: Any)" in message


def test_result_is_handed_back() -> None:
    """What the module returns comes back as it is, with and without keywords."""
    result = object()

    for forward in (lambda x: result, lambda *, x: result, lambda **x: result):
        inputs = binding.bind_inputs(build.MODEL, ["x"], arguments(forward))
        assert inputs.call(forward, [1]) is result


@pytest.mark.parametrize(
    ("forward", "names", "said"),
    [
        pytest.param(
            two,
            ["x"],
            ["no input feeds forward()'s argument y", "inputs for forward(x: Any, y: Any)"],
            id="argument left out",
        ),
        pytest.param(
            two, ["i__1"], ["no input feeds forward()'s argument x"], id="number left out"
        ),
        pytest.param(
            two, ["image"], ["no input feeds forward()'s argument y"], id="order too short"
        ),
        pytest.param(
            keyword_only,
            ["x"],
            ["no input feeds forward()'s argument y", "give the arguments defaults"],
            id="keyword-only left out",
        ),
        pytest.param(
            one_and_any_name, ["b"], ["no input feeds forward()'s argument x"], id="** without x"
        ),
        pytest.param(
            two,
            ["x", "z"],
            [
                "forward() has no argument z",
                "expected names among x, y, INPUT__0, INPUT__1",
                "forward() is forward(x: Any, y: Any).",
            ],
            id="one unknown",
        ),
        pytest.param(two, ["x", "i__1"], ["forward() has no argument i__1"], id="name and number"),
        pytest.param(
            two, ["i__0", "mask"], ["forward() has no argument i__0, mask"], id="number and unknown"
        ),
        pytest.param(two, ["x", "y", "z"], ["forward() has no argument z"], id="one too many"),
        pytest.param(
            one_and_many,
            ["x", "a"],
            ["forward() has no argument a; expected names among x, INPUT__0."],
            id="name and unknown for *",
        ),
        pytest.param(
            two,
            ["i__0", "i__2"],
            ["input i__2 points past the arguments", "at most 2 inputs, numbered from 0"],
            id="number out of range",
        ),
        pytest.param(
            two,
            ["i__7", "i__8"],
            ["input i__7, i__8 points past the arguments"],
            id="both out of range",
        ),
        pytest.param(
            two,
            ["a", "b", "c"],
            ["input c points past the arguments of forward(x: Any, y: Any)", "at most 2 inputs"],
            id="order too long",
        ),
        pytest.param(lambda: None, ["a"], ["input a points past the arguments"], id="no arguments"),
        pytest.param(
            two, ["a__0", "b__0"], ["the inputs a__0, b__0 carry the same number twice"], id="twice"
        ),
        pytest.param(two, ["x", "x"], ["no input feeds forward()'s argument y"], id="name twice"),
        pytest.param(
            many, ["i__0", "i__2"], ["input i__2 points past the arguments"], id="gap in *"
        ),
        pytest.param(
            many,
            ["i__0", "i__1000000000000"],
            ["input i__1000000000000 points past the arguments"],
            id="enormous number for *",
        ),
        pytest.param(
            gap_and_many,
            ["i__0", "i__2"],
            ["input i__2 points past the arguments"],
            id="gap before *",
        ),
        pytest.param(
            keyword_only,
            ["i__0", "i__1"],
            ["input i__1 points past the arguments", "at most 1 inputs"],
            id="number for keyword-only",
        ),
    ],
)
def test_names_that_do_not_fit_are_refused(
    forward: Callable[..., Any], names: list[str], said: list[str]
) -> None:
    """At load, a name that leads nowhere is told beside the names that lead somewhere."""
    with pytest.raises(BindingError) as raised:
        binding.bind_inputs(build.MODEL, names, arguments(forward))

    assert str(raised.value).startswith("model 'digits': ")
    assert isinstance(raised.value, LoadError)
    assert all(part in str(raised.value) for part in said)


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        pytest.param(keyword_only, "forward(x: Any, *, y: Any, z: Any = None)", id="bare star"),
        pytest.param(stars, "forward(x: Any, *others: Any, y: Any, **more: Any)", id="stars"),
    ],
)
def test_signature_in_a_message_is_the_users(forward: Callable[..., Any], text: str) -> None:
    """A refusal shows forward() as its author wrote it, with the stars."""
    with pytest.raises(BindingError, match=re.escape(text)):
        binding.bind_inputs(build.MODEL, ["x"], arguments(forward))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("INPUT__0", 0),
        ("x__12", 12),
        ("a__b__3", 3),
        ("x__007", 7),
        ("x", None),
        ("x_1", None),
        ("x1", None),
        ("__1", None),
        ("x__", None),
        ("x__-1", None),
        ("x__1.0", None),
        ("x__1 ", None),
        ("x__1\n", None),
        ("", None),
    ],
)
def test_number_of_a_name(name: str, number: int | None) -> None:
    """A number stands after two underscores, at the end, behind at least one letter."""
    assert binding.ordinal(name) == number


# --- outputs ---------------------------------------------------------------------------------


class Pair(NamedTuple):
    mean: int
    deviation: int


@dataclasses.dataclass
class Record:
    mean: int
    deviation: int


class ModelOutput(collections.OrderedDict[str, Any]):
    """Like Hugging Face's: a mapping and an object with attributes."""

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
    return list(binding.bind_outputs(build.MODEL, names, result)(result))


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
def test_parts_are_found_in_any_result(kind: str, names: list[str], parts: list[int]) -> None:
    """Every kind of result has parts with numbers and an order."""
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
def test_parts_are_found_by_their_names(kind: str, names: list[str], parts: list[int]) -> None:
    """Keys and fields of a result are names of outputs, in any order."""
    assert taken(RESULTS[kind], names) == parts


@pytest.mark.parametrize("name", ["y", "OUTPUT__0", "result"])
def test_tensor_is_the_only_output(name: str) -> None:
    """A result that is one tensor is the one output, whatever its name."""
    assert taken(TENSOR, [name]) == [TENSOR]


@pytest.mark.parametrize("result", [(TENSOR,), [TENSOR], {"y": TENSOR}, {"z": TENSOR}], ids=repr)
def test_single_part_is_taken_out(result: Any) -> None:
    """A result with one part gives the part, not its container."""
    (part,) = taken(result, ["y"])

    assert part is TENSOR


def test_name_before_number() -> None:
    """A key that looks like a number of another part is a key all the same."""
    result = {"o__1": 10, "o__0": 20}

    assert taken(result, ["o__0", "o__1"]) == [20, 10]


def test_keys_need_not_be_text() -> None:
    """A dict with numbers as keys has outputs named as the numbers are written."""
    assert taken({7: 10, 5: 20}, ["5", "7"]) == [20, 10]


def test_parts_are_taken_from_each_result_anew() -> None:
    """What was bound to the first result serves the following ones."""
    outputs = binding.bind_outputs(build.MODEL, ["deviation"], RESULTS["dict"])

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
def test_ignored_names_of_a_result_are_warned_about(
    names: list[str], kind: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the result has names and the config others, one line says that the order decides."""
    binding.bind_outputs(build.MODEL, names, RESULTS[kind])

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
            ["the outputs y, z", "one Tensor", "names among OUTPUT__0."],
            id="two of a tensor",
        ),
        pytest.param(TENSOR, ["o__1"], ["the outputs o__1", "one Tensor"], id="tensor's second"),
        pytest.param(None, ["y", "z"], ["one NoneType"], id="None"),
        pytest.param((), ["y"], ["tuple of 0"], id="empty tuple"),
        pytest.param({}, ["y"], ["dict"], id="empty dict"),
        pytest.param(
            RESULTS["tuple"],
            ["a", "b", "c"],
            ["tuple of 2", "OUTPUT__0, OUTPUT__1."],
            id="too many",
        ),
        pytest.param(RESULTS["list"], ["o__0", "o__2"], ["list of 2"], id="number out of range"),
        pytest.param(RESULTS["tuple"], ["a__0", "b__0"], ["a__0, b__0"], id="number twice"),
        pytest.param(RESULTS["tuple"], ["o__0", "b"], ["o__0, b"], id="number and unknown"),
        pytest.param(
            RESULTS["dict"],
            ["mean", "variance"],
            [
                "the outputs mean, variance do not fit",
                "dict with mean, deviation",
                "names among mean, deviation, OUTPUT__0, OUTPUT__1.",
            ],
            id="one unknown key",
        ),
        pytest.param(
            RESULTS["dict"], ["mean", "o__1"], ["dict with mean, deviation"], id="key and number"
        ),
        pytest.param(
            RESULTS["dataclass"],
            ["mean", "variance"],
            ["Record with mean, deviation"],
            id="unknown field",
        ),
        pytest.param(RESULTS["named tuple"], ["a", "b", "c"], ["Pair of 2"], id="too many fields"),
        pytest.param(RESULTS["dict"], ["mean", "mean"], ["the outputs mean, mean"], id="key twice"),
    ],
)
def test_outputs_that_the_result_lacks_are_refused(
    result: Any, names: list[str], said: list[str]
) -> None:
    """Names that the result does not have are told beside those that it has."""
    with pytest.raises(BindingError) as raised:
        binding.bind_outputs(build.MODEL, names, result)

    assert str(raised.value).startswith("model 'digits': the outputs ")
    assert all(part in str(raised.value) for part in said)
