"""Binding of input names to the leaves of forward()'s call tree."""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict

import build
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend.errors import BindingError, LoadError
from torch_py_backend.signature import binding, introspection
from torch_py_backend.signature.binding import ArgumentType, BindingRule, InputBinding, Signature


def bound(
    forward: Callable[..., Any], names: Sequence[str], left_out: Collection[str] = ()
) -> InputBinding:
    return binding.bind_inputs(build.MODEL, names, introspection.from_function(forward), left_out)


def called(forward: Callable[..., Any], names: Sequence[str], *left_out: str) -> Any:
    """Return the arguments of forward() if each column is the name of its tensor."""
    inputs = bound(forward, names, left_out)
    assert sorted(inputs.names) == sorted(set(names) - set(left_out))
    assert len(inputs.takes) == len(inputs.places) == len(inputs.names)
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


def takes_list(tensors: list[Tensor]) -> Any:
    return tensors


def takes_tuple(tensors: tuple[Tensor, ...]) -> Any:
    return tensors


def takes_optional_dict(tensors: dict[str, Tensor] | None = None) -> Any:
    return tensors


def dict_and_default(tensors: dict[str, Tensor], scale: float = 1.0) -> Any:
    return {"tensors": tensors, "scale": scale}


def takes_tuple_and_list(x: tuple[Tensor, Tensor], y: list[Tensor]) -> Any:
    return {"x": x, "y": y}


def nullable(x: Any, y: Tensor | None, z: Any = "default") -> Any:
    return {"x": x, "y": y, "z": z}


def nullable_keyword(x: Any, *, y: Tensor | None) -> Any:
    return {"x": x, "y": y}


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
        pytest.param(two, ["__1", "b__00"], {"x": "b__00", "y": "__1"}, id="numbers alone"),
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
        pytest.param(two, ["x", "i__1"], {"x": "x", "y": "i__1"}, id="name and number"),
        # by path
        pytest.param(
            two, ["ARGS[1]", "ARGS[0]"], {"x": "ARGS[0]", "y": "ARGS[1]"}, id="paths reversed"
        ),
        pytest.param(two, ["y", "ARGS[0]"], {"x": "ARGS[0]", "y": "y"}, id="name and path"),
        pytest.param(
            two, ["KWARGS[y]", "i__0"], {"x": "i__0", "y": "KWARGS[y]"}, id="number and path"
        ),
        pytest.param(
            keyword_only,
            ["KWARGS[y]", "KWARGS[x]"],
            {"x": "KWARGS[x]", "y": "KWARGS[y]", "z": None},
            id="paths by keyword",
        ),
        pytest.param(many, ["ARGS[1]", "ARGS[0]"], ("ARGS[0]", "ARGS[1]"), id="* paths reversed"),
        pytest.param(
            two,
            ["ARGS[1][b]", "ARGS[1][a][1]", "x", "ARGS[1][a][0]"],
            {"x": "x", "y": {"b": "ARGS[1][b]", "a": ["ARGS[1][a][0]", "ARGS[1][a][1]"]}},
            id="nested dict and list",
        ),
        pytest.param(
            two,
            ["ARGS[1][1][k]", "ARGS[0][0]", "ARGS[1][0]"],
            {"x": ["ARGS[0][0]"], "y": ["ARGS[1][0]", {"k": "ARGS[1][1][k]"}]},
            id="nested lists",
        ),
        pytest.param(
            two,
            ["KWARGS[y][a b-c.d]", "x"],
            {"x": "x", "y": {"a b-c.d": "KWARGS[y][a b-c.d]"}},
            id="key of any letters",
        ),
        pytest.param(
            keyword_only,
            ["KWARGS[y][0]", "x"],
            {"x": "x", "y": ["KWARGS[y][0]"], "z": None},
            id="nested keyword-only",
        ),
        pytest.param(
            takes_tuple_and_list,
            ["ARGS[1][1]", "ARGS[1][0]", "ARGS[0][1]", "ARGS[0][0]"],
            {"x": ("ARGS[0][0]", "ARGS[0][1]"), "y": ["ARGS[1][0]", "ARGS[1][1]"]},
            id="tuple where one is annotated",
        ),
        pytest.param(
            one_and_any_name,
            ["x", "KWARGS[b]"],
            {"x": "x", "others": {"b": "KWARGS[b]"}},
            id="** by path",
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
        pytest.param(takes_list, ["b", "a"], ["b", "a"], id="list in the config's order"),
        pytest.param(takes_list, ["only"], ["only"], id="list of one"),
        pytest.param(
            takes_list, ["ARGS[0][1]", "ARGS[0][0]"], ["ARGS[0][0]", "ARGS[0][1]"], id="list, paths"
        ),
        pytest.param(
            takes_list,
            ["INPUT__1", "INPUT__0"],
            ["INPUT__0", "INPUT__1"],
            id="list numbers reversed",
        ),
        pytest.param(takes_tuple, ["b", "a"], ("b", "a"), id="tuple in the config's order"),
        pytest.param(
            takes_dict,
            ["ARGS[0][b]", "ARGS[0][a]"],
            {"a": "ARGS[0][a]", "b": "ARGS[0][b]"},
            id="dict, paths",
        ),
        pytest.param(
            dict_and_default,
            ["b", "a"],
            {"tensors": {"a": "a", "b": "b"}, "scale": 1.0},
            id="dict beside a default",
        ),
        pytest.param(takes_optional_dict, ["b", "a"], {"a": "a", "b": "b"}, id="optional dict"),
        pytest.param(
            takes_dict,
            ["ARGS[0][0]"],
            {"0": "ARGS[0][0]"},
            id="dict, numbers as keys",
        ),
        pytest.param(takes_dict, ["b", "a"], {"a": "a", "b": "b"}, id="dict"),
        pytest.param(takes_dict, ["i__1"], {"i__1": "i__1"}, id="dict numbers"),
        pytest.param(takes_dict, ["tensors"], {"tensors": "tensors"}, id="dict of its own name"),
    ],
)
def test_each_argument_gets_its_tensor(
    forward: Callable[..., Any], names: list[str], received: Any
) -> None:
    """Inputs are bound by name, path or number, else in the config's order."""
    assert called(forward, names) == received


@pytest.mark.parametrize(
    ("names", "warned"),
    [
        pytest.param(["x", "y"], False, id="names"),
        pytest.param(["i__1", "i__0"], False, id="numbers"),
        pytest.param(["ARGS[1]", "KWARGS[x]"], False, id="paths"),
        pytest.param(["image", "mask"], True, id="order"),
    ],
)
def test_only_the_configs_order_is_warned_about(
    names: list[str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Binding in the config's order logs one warning with names and signature."""
    bound(two, names)

    assert [record.levelno for record in caplog.records] == [logging.WARNING] * warned
    if warned:
        (message,) = caplog.messages
        assert "'digits'" in message
        assert "image, mask" in message
        assert "forward(x: Any, y: Any)" in message


def test_result_is_returned() -> None:
    """The result of the module is returned unchanged, with and without keywords."""
    result = object()

    for forward in (lambda x: result, lambda *, x: result, lambda **x: result):
        inputs = bound(forward, ["x"])
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
                "forward(x: Any, y: Any) has no z; expected names among x, y,",
                "x, y, INPUT__0, INPUT__1, ARGS[0], ARGS[1].",
            ],
            id="one unknown",
        ),
        pytest.param(
            two, ["i__0", "mask"], ["(x: Any, y: Any) has no mask"], id="number and unknown"
        ),
        pytest.param(two, ["ARGS[0]", "mask"], [") has no mask;"], id="path and unknown"),
        pytest.param(two, ["x", "y", "z"], ["(x: Any, y: Any) has no z;"], id="one too many"),
        pytest.param(
            one_and_many,
            ["x", "a"],
            [") has no a; expected names among x, INPUT__0, INPUT__1, ARGS[0], ARGS[1]."],
            id="name and unknown for *",
        ),
        pytest.param(
            two,
            ["i__0", "i__2"],
            ["(x: Any, y: Any) has no i__2;", "INPUT__0, INPUT__1"],
            id="number out of range",
        ),
        pytest.param(two, ["i__7", "i__8"], [") has no i__7, i__8;"], id="both out of range"),
        pytest.param(
            two,
            ["a", "b", "c"],
            ["3 inputs do not fit forward(x: Any, y: Any); expected at most 2 inputs"],
            id="order too long",
        ),
        pytest.param(
            lambda: None, ["a"], ["1 inputs do not fit forward(); expected at most 0"], id="nothing"
        ),
        pytest.param(
            two,
            ["a__0", "b__0"],
            ["two of the inputs a__0, b__0 feed the same argument; expected one input for each"],
            id="number twice",
        ),
        pytest.param(
            two, ["x", "i__0"], ["x, i__0 feed the same argument"], id="name and its number"
        ),
        pytest.param(
            two, ["x", "KWARGS[x]"], ["x, KWARGS[x] feed the same"], id="name and its path"
        ),
        pytest.param(
            two, ["x", "x"], ["the inputs x, x carry the same name twice"], id="name twice"
        ),
        pytest.param(many, ["i__0", "i__2"], [") has no i__2;"], id="gap in *"),
        pytest.param(
            many, ["i__0", "i__1000000000000"], ["no i__1000000000000"], id="enormous number for *"
        ),
        pytest.param(gap_and_many, ["i__0", "i__2"], ["Any) has no i__2;"], id="gap before *"),
        pytest.param(
            keyword_only,
            ["i__0", "i__1"],
            [") has no i__1;", "names among x, y, z, INPUT__0, ARGS[0]."],
            id="number for keyword-only",
        ),
        # paths
        pytest.param(two, ["ARGS[0]", "ARGS[2]"], [") has no ARGS[2];"], id="path out of range"),
        pytest.param(
            two, ["x", "KWARGS[z]"], [") has no KWARGS[z];"], id="path to an unknown argument"
        ),
        pytest.param(
            keyword_only, ["x", "ARGS[1]"], [") has no ARGS[1];"], id="position of a keyword-only"
        ),
        pytest.param(two, ["x", "RESULT[0]"], [") has no RESULT[0];"], id="path of a result"),
        pytest.param(two, ["x", "ARGS"], [") has no ARGS;"], id="path without a key"),
        pytest.param(two, ["x", "ARGS[1"], [") has no ARGS[1;"], id="path without its end"),
        pytest.param(two, ["x", "ARGS[]"], [") has no ARGS[];"], id="path with an empty key"),
        pytest.param(two, ["x", "ARGS[-1]"], [") has no ARGS[-1];"], id="path from the end"),
        pytest.param(
            two,
            ["ARGS[0]", "ARGS[0][a]", "y"],
            ["ARGS[0], ARGS[0][a] feed an argument and a part of it at once"],
            id="whole and part",
        ),
        pytest.param(
            two,
            ["x", "ARGS[1][a]", "ARGS[1][a][0]"],
            ["ARGS[1][a], ARGS[1][a][0] feed an argument and a part of it at once"],
            id="part and its part",
        ),
        pytest.param(
            two,
            ["x", "ARGS[1][0]", "ARGS[1][2]"],
            ["ARGS[1][0], ARGS[1][2] leave gaps in a list; expected items 0 to 1"],
            id="gap in a list",
        ),
    ],
)
def test_unknown_names(forward: Callable[..., Any], names: list[str], said: list[str]) -> None:
    """A name that matches no argument is rejected; the error lists the valid names."""
    with pytest.raises(BindingError) as raised:
        bound(forward, names)

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
def test_signature_in_a_message(forward: Callable[..., Any], text: str) -> None:
    """Messages show the declaration of forward(), including `*`."""
    with pytest.raises(BindingError, match=re.escape(text)):
        bound(forward, ["x"])


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("INPUT__0", 0),
        ("x__12", 12),
        ("a__b__3", None),
        ("__3", 3),
        ("x__007", 7),
        ("x", None),
        ("x_1", None),
        ("x1", None),
        ("x__", None),
        ("x__-1", None),
        ("x__1.0", None),
        ("x__1 ", None),
        ("x__1\n", None),
        ("", None),
    ],
)
def test_number_of_a_name(name: str, number: int | None) -> None:
    """The number is all digits after the first two underscores, as in LibTorch."""
    assert binding.ordinal(name) == number


# --- TorchScript: the rule of Triton's LibTorch backend ----------------------------------------


class Difference(nn.Module):
    def forward(self, INPUT0: Tensor, INPUT1: Tensor) -> Tensor:
        return INPUT0 - INPUT1


class Numbered(nn.Module):
    def forward(self, a__1: Tensor, b: Tensor) -> Tensor:
        return a__1 - b


class WithDefault(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x


class OfDict(nn.Module):
    def forward(self, tensors: dict[str, Tensor]) -> Tensor:
        return tensors["x"]


def scripted(module: nn.Module) -> Signature:
    compiled: Any = torch.jit.script(module)
    return introspection.from_schema(compiled.forward.schema)


@pytest.mark.parametrize(
    ("module", "names", "order", "rule"),
    [
        pytest.param(
            Difference, ["INPUT1", "INPUT0"], [1, 0], BindingRule.ARGUMENTS, id="arguments"
        ),
        pytest.param(Difference, ["i__1", "i__0"], [1, 0], BindingRule.NUMBERS, id="numbers"),
        pytest.param(Difference, ["image", "mask"], [0, 1], BindingRule.ORDER, id="others"),
        pytest.param(
            Difference, ["image", "INPUT__1"], [0, 1], BindingRule.ORDER, id="other and number"
        ),
        pytest.param(
            Difference, ["INPUT__1", "image"], [0, 1], BindingRule.ORDER, id="number and other"
        ),
        pytest.param(
            Difference, ["INPUT__1", "INPUT0"], [0, 1], BindingRule.ORDER, id="number and argument"
        ),
        pytest.param(
            Difference, ["INPUT1", "INPUT__0"], [0, 1], BindingRule.ORDER, id="argument and number"
        ),
        pytest.param(
            Difference, ["INPUT1", "image"], [0, 1], BindingRule.ORDER, id="argument and other"
        ),
        pytest.param(Difference, ["a__b__1", "a__b__0"], [0, 1], BindingRule.ORDER, id="no number"),
        pytest.param(Difference, ["ARGS[1]", "INPUT0"], [1, 0], BindingRule.OWN, id="path"),
        pytest.param(
            Numbered, ["b", "a__1"], [1, 0], BindingRule.ARGUMENTS, id="argument with a number"
        ),
        pytest.param(
            Numbered, ["a__1", "c__0"], [1, 0], BindingRule.NUMBERS, id="numbers before one"
        ),
        pytest.param(WithDefault, ["image"], [0], BindingRule.ORDER, id="fewer than arguments"),
        pytest.param(OfDict, ["y", "x__1"], [0, 0], BindingRule.KEYS, id="dict"),
    ],
)
def test_scripted_arguments_get_their_tensors_by_one_rule(
    module: type[nn.Module], names: list[str], order: list[int], rule: BindingRule
) -> None:
    """In TorchScript one rule binds all inputs: names, numbers or the config's order."""
    signature = scripted(module())
    declared = [one.name for one in signature.arguments]

    inputs = binding.bind_inputs(build.MODEL, names, signature)

    places = dict(zip(inputs.names, inputs.places, strict=True))
    wanted = [declared[index] for index in order]
    assert [places[name].partition("[")[0] for name in names] == wanted
    assert binding.rule(names, signature) is rule


def test_order_of_scripted_arguments_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Binding in the config's order logs one warning."""
    binding.bind_inputs(build.MODEL, ["image", "INPUT__1"], scripted(Difference()))

    (message,) = caplog.messages
    assert "image, INPUT__1 are not all arguments of forward(" in message
    assert "passed in the config's order" in message


@pytest.mark.parametrize(
    ("names", "kept", "places"),
    [
        pytest.param(["image", "i__1"], ["i__1"], ["INPUT0", "INPUT1"], id="control behind"),
        pytest.param(["image", "i__0"], ["i__0"], ["INPUT1", "INPUT0"], id="control before"),
        pytest.param(["INPUT0", "i__1"], ["i__1"], ["INPUT0", "INPUT1"], id="argument and control"),
        pytest.param(["i__0", "INPUT1"], ["INPUT1"], ["INPUT0", "INPUT1"], id="control by name"),
        pytest.param(["INPUT", "START"], ["START"], ["INPUT0", "INPUT1"], id="control by order"),
    ],
)
def test_states_are_bound_separately(names: list[str], kept: list[str], places: list[str]) -> None:
    """States and controls are bound by their own names; other inputs follow the rule."""
    inputs = binding.bind_inputs(build.MODEL, names, scripted(Difference()), kept=kept)

    found = dict(zip(inputs.names, inputs.places, strict=True))
    assert [found[name] for name in names] == places


@pytest.mark.parametrize(
    ("names", "said"),
    [
        pytest.param(["i__0", "i__2"], "has no i__2; expected names among INPUT0", id="range"),
        pytest.param(["a__0", "b__0"], "a__0, b__0 feed the same argument", id="number twice"),
        pytest.param(["a", "b", "c"], "3 inputs do not fit forward(", id="too many"),
        pytest.param(["a"], "no input feeds forward()'s argument INPUT1", id="too few"),
        pytest.param(["ARGS[0]", "mask"], "has no mask", id="path and other"),
    ],
)
def test_names_that_no_rule_binds(names: list[str], said: str) -> None:
    """If there are more inputs than arguments, the load fails with the valid names."""
    with pytest.raises(BindingError, match=re.escape(said)):
        binding.bind_inputs(build.MODEL, names, scripted(Difference()))


@pytest.mark.parametrize(
    ("forward", "names", "rule"),
    [
        pytest.param(two, ["y", "x"], BindingRule.ARGUMENTS, id="arguments"),
        pytest.param(two, ["i__1", "i__0"], BindingRule.NUMBERS, id="numbers"),
        pytest.param(two, ["x", "i__1"], BindingRule.OWN, id="argument and number"),
        pytest.param(two, ["x", "ARGS[1]"], BindingRule.OWN, id="argument and path"),
        pytest.param(two, ["image", "mask"], BindingRule.ORDER, id="others"),
        pytest.param(takes_dict, ["a", "b"], BindingRule.KEYS, id="dict"),
        pytest.param(takes_list, ["a", "b"], BindingRule.KEYS, id="list"),
    ],
)
def test_rule_of_python_functions(
    forward: Callable[..., Any], names: list[str], rule: BindingRule
) -> None:
    """In Python each name is bound separately: a misspelt one is not bound by order."""
    assert binding.rule(names, introspection.from_function(forward)) is rule


# --- inputs that are left out ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "names", "left_out", "received"),
    [
        pytest.param(
            defaults, ["x", "y", "z"], ["z"], {"x": "x", "y": "y", "z": None}, id="last default"
        ),
        pytest.param(
            defaults, ["x", "y", "z"], ["y"], {"x": "x", "y": None, "z": "z"}, id="default before z"
        ),
        pytest.param(
            defaults, ["z", "y", "x"], ["y", "z"], {"x": "x", "y": None, "z": None}, id="two"
        ),
        pytest.param(
            defaults,
            ["i__0", "i__1", "i__2"],
            ["i__1"],
            {"x": "i__0", "y": None, "z": "i__2"},
            id="by number",
        ),
        pytest.param(
            defaults, ["a", "b", "c"], ["b"], {"x": "a", "y": None, "z": "c"}, id="by order"
        ),
        pytest.param(
            nullable, ["x", "y"], ["y"], {"x": "x", "y": None, "z": "default"}, id="may be None"
        ),
        pytest.param(
            nullable, ["x", "y", "z"], ["y"], {"x": "x", "y": None, "z": "z"}, id="None before z"
        ),
        pytest.param(nullable, ["x"], [], {"x": "x", "y": None, "z": "default"}, id="never there"),
        pytest.param(nullable_keyword, ["x", "y"], ["y"], {"x": "x", "y": None}, id="keyword-only"),
        pytest.param(takes_dict, ["a", "b"], ["a"], {"b": "b"}, id="key of a dict"),
        pytest.param(takes_list, ["a", "b"], ["b"], ["a"], id="end of a list"),
        pytest.param(any_name, ["a", "b"], ["a"], {"b": "b"}, id="one of **"),
        pytest.param(many, ["a", "b"], ["b"], ("a",), id="end of *"),
        pytest.param(
            two,
            ["x", "ARGS[1][a]", "ARGS[1][b]"],
            ["ARGS[1][a]"],
            {"x": "x", "y": {"b": "ARGS[1][b]"}},
            id="nested key",
        ),
        pytest.param(
            defaults,
            ["x", "ARGS[1][a]", "ARGS[1][b]"],
            ["ARGS[1][a]", "ARGS[1][b]"],
            {"x": "x", "y": None, "z": None},
            id="all of a nested default",
        ),
    ],
)
def test_argument_keeps_its_default(
    forward: Callable[..., Any], names: list[str], left_out: list[str], received: Any
) -> None:
    """An argument without input has its default, or None."""
    assert called(forward, names, *left_out) == received


@pytest.mark.parametrize(
    ("forward", "names", "left_out", "said"),
    [
        pytest.param(
            two,
            ["x", "y"],
            ["y"],
            ["no input feeds forward()'s argument y; y cannot be optional", "forward(x: Any"],
            id="without a default",
        ),
        pytest.param(
            keyword_only,
            ["x", "y"],
            ["y"],
            ["no input feeds forward()'s argument y; y cannot be optional"],
            id="keyword-only without a default",
        ),
        pytest.param(
            gap_and_many,
            ["i__0", "i__1", "i__2"],
            ["i__1"],
            ["inputs for * of forward(x: Any, y: Any = None, *others: Any) leave a gap"],
            id="gap before *",
        ),
        pytest.param(
            many,
            ["a", "b"],
            ["a"],
            ["leave a gap"],
            id="gap in *",
        ),
        pytest.param(
            takes_list, ["a", "b", "c"], ["b"], ["a, c leave gaps in a list"], id="gap in a list"
        ),
    ],
)
def test_required_input_cannot_be_optional(
    forward: Callable[..., Any], names: list[str], left_out: list[str], said: list[str]
) -> None:
    """An optional input of a required argument is rejected; the error names the argument."""
    with pytest.raises(BindingError) as raised:
        bound(forward, names, left_out)

    assert str(raised.value).startswith("model 'digits': ")
    assert all(part in str(raised.value) for part in said)


def test_gap_before_a_positional_only_argument() -> None:
    """A positional-only argument after one without input is rejected."""

    def forward(x: Any, y: Any = None, z: Any = None, /) -> Any: ...

    with pytest.raises(BindingError):
        bound(forward, ["x", "z"])


# --- what each column becomes ----------------------------------------------------------------


def typed(
    n: int, f: float, flag: bool, s: str, ss: list[str], bs: list[bytes], x: Tensor, rest: Any
) -> Any: ...


def test_types_of_columns() -> None:
    """Each column has the type of its argument, in the order of the call."""
    names = ["x", "bs", "ss", "s", "flag", "f", "n", "rest"]

    inputs = bound(typed, names)

    assert dict(zip(inputs.names, inputs.takes, strict=True)) == {
        "n": ArgumentType.INT,
        "f": ArgumentType.FLOAT,
        "flag": ArgumentType.BOOL,
        "s": ArgumentType.STR,
        "ss": ArgumentType.STRINGS,
        "bs": ArgumentType.BYTES,
        "x": ArgumentType.TENSOR,
        "rest": ArgumentType.TENSOR,
    }


def test_parts_of_an_argument_are_tensors() -> None:
    """Items of a dict, list or tuple are tensors."""
    inputs = bound(takes_tuple_and_list, ["ARGS[0][0]", "ARGS[0][1]", "ARGS[1][0]"])
    whole = bound(takes_tuple_and_list, ["x", "y"])

    assert set(inputs.takes) == {ArgumentType.TENSOR}
    assert set(whole.takes) == {ArgumentType.TENSOR}


# --- dicts of known keys -----------------------------------------------------------------------


class Pair(TypedDict):
    x: Tensor
    mask: Tensor | None


class More(Pair, total=False):
    size: int


def takes_pair(pair: Pair) -> Any:
    return pair


def takes_more(more: More | None = None, scale: Any = "default") -> Any:
    return more, scale


def takes_more_and_scale(more: More, scale: Tensor, size: Tensor) -> Any:
    return more, scale, size


@pytest.mark.parametrize(
    ("forward", "names", "received"),
    [
        pytest.param(takes_pair, ["mask", "x"], {"x": "x", "mask": "mask"}, id="keys"),
        pytest.param(takes_pair, ["x"], {"x": "x", "mask": None}, id="key-that-may-be-none"),
        pytest.param(
            takes_pair, ["i__1", "i__0"], {"x": "i__0", "mask": "i__1"}, id="numbers-of-keys"
        ),
        pytest.param(
            takes_pair,
            ["ARGS[0][x]", "KWARGS[pair][mask]"],
            {"x": "ARGS[0][x]", "mask": "KWARGS[pair][mask]"},
            id="paths",
        ),
        pytest.param(
            takes_more,
            ["x", "size"],
            ({"x": "x", "mask": None, "size": "size"}, "default"),
            id="more",
        ),
        pytest.param(
            takes_more_and_scale,
            ["scale", "x", "size"],
            ({"x": "x", "mask": None}, "scale", "size"),
            id="an-argument's-name-first",
        ),
        pytest.param(
            takes_more_and_scale,
            ["i__1", "i__2", "x", "ARGS[0][size]"],
            ({"x": "x", "mask": None, "size": "ARGS[0][size]"}, "i__1", "i__2"),
            id="numbers-of-arguments",
        ),
    ],
)
def test_keys_are_inputs(forward: Callable[..., Any], names: list[str], received: Any) -> None:
    """Each key of a TypedDict has its own input."""
    assert called(forward, names) == received


def test_types_of_keys() -> None:
    """A key with type int receives an int."""
    inputs = bound(takes_more, ["x", "size"])

    assert dict(zip(inputs.names, inputs.takes, strict=True)) == {
        "x": ArgumentType.TENSOR,
        "size": ArgumentType.INT,
    }


@pytest.mark.parametrize(
    ("left_out", "received"), [(["size"], {"x": "x", "mask": "mask"}), (["mask"], {"x": "x"})]
)
def test_optional_keys(left_out: list[str], received: dict[str, str]) -> None:
    """Keys that are not required are left out; required keys that allow None are None."""
    more, _ = called(takes_more, ["x", "mask", "size"], *left_out)

    rest = {"mask": None, "size": "size"} if left_out == ["mask"] else {}
    assert more == received | rest


@pytest.mark.parametrize(
    ("forward", "names", "left_out", "says"),
    [
        pytest.param(
            takes_pair,
            ["x", "y"],
            [],
            ["has no key y; expected names among x, mask"],
            id="stranger",
        ),
        pytest.param(takes_pair, ["i__2"], [], ["has no key i__2"], id="number-out-of-range"),
        pytest.param(takes_pair, ["pair"], [], ["has no key pair"], id="whole"),
        pytest.param(
            takes_pair, ["mask"], [], ["the inputs mask do not make the dict pair"], id="missing"
        ),
        pytest.param(
            takes_pair,
            ["x", "mask"],
            ["x"],
            ["expected inputs for its keys x, mask"],
            id="optional",
        ),
        pytest.param(takes_pair, ["x", "i__0"], [], ["feed the same argument"], id="twice"),
        pytest.param(
            takes_pair, ["ARGS[0][y]"], [], ["do not make the dict pair"], id="path-to-a-stranger"
        ),
        pytest.param(
            takes_more_and_scale,
            ["more", "scale", "size"],
            [],
            ["the inputs more do not make the dict more"],
            id="whole-of-several",
        ),
        pytest.param(
            takes_more_and_scale,
            ["y", "x", "scale"],
            [],
            ["names among more", "mask"],
            id="unknown",
        ),
    ],
)
def test_invalid_keys(
    forward: Callable[..., Any], names: list[str], left_out: list[str], says: list[str]
) -> None:
    """Unknown keys, missing keys and a tensor in place of the dict are rejected."""
    with pytest.raises(BindingError) as raised:
        bound(forward, names, left_out)

    assert all(part in str(raised.value) for part in says), str(raised.value)


def test_places() -> None:
    """The place of each input is shown: an argument, a part of one, an item of *args."""
    inputs = bound(everything, ["ARGS[0][key]", "ARGS[1]", "y", "w"])

    places = dict(zip(inputs.names, inputs.places, strict=True))
    assert places == {"ARGS[0][key]": "x[key]", "ARGS[1]": "*1", "y": "y", "w": "w"}


# --- artifacts that carry their call tree ----------------------------------------------------


def closed(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
    constants: Mapping[int, Any] | None = None,
) -> Signature:
    """Return the signature of a program that was exported with such a tree."""
    spec = pytree.tree_structure((args, dict(kwargs or {})))
    return introspection.from_tree(spec, dict(constants or {}), names)


def called_closed(signature: Signature, names: Sequence[str]) -> Any:
    inputs = binding.bind_inputs(build.MODEL, names, signature)
    assert inputs.takes == (ArgumentType.TENSOR,) * len(names)
    assert inputs.places == signature.leaves
    return inputs.call(lambda *args, **kwargs: (args, kwargs), inputs.names)


TREE = closed((0, {"z": 0, "a": [0, 0]}), {"scale": 0}, ["x", "extra"])


@pytest.mark.parametrize(
    ("signature", "names", "received"),
    [
        pytest.param(closed((0,), names=["x"]), ["x"], (("x",), {}), id="argument"),
        pytest.param(closed((0,)), ["anything"], (("anything",), {}), id="the only one"),
        pytest.param(closed((0, 0)), ["i__1", "i__0"], (("i__0", "i__1"), {}), id="numbers"),
        pytest.param(
            closed((0, 0)), ["ARGS[1]", "ARGS[0]"], (("ARGS[0]", "ARGS[1]"), {}), id="paths"
        ),
        pytest.param(
            closed((0,), {"b": 0, "a": 0}, ["x"]),
            ["a", "KWARGS[b]", "x"],
            (("x",), {"b": "KWARGS[b]", "a": "a"}),
            id="keywords in the program's order",
        ),
        pytest.param(
            TREE,
            ["scale", "ARGS[1][a][1]", "z", "ARGS[1][a][0]", "x"],
            (("x", {"z": "z", "a": ["ARGS[1][a][0]", "ARGS[1][a][1]"]}), {"scale": "scale"}),
            id="nested in another order",
        ),
        pytest.param(
            TREE,
            [f"in__{number}" for number in (4, 3, 2, 1, 0)],
            (("in__0", {"z": "in__1", "a": ["in__2", "in__3"]}), {"scale": "in__4"}),
            id="numbers are the program's",
        ),
        pytest.param(
            closed((0, 0, 0), names=["x", "n", "y"], constants={1: 7}),
            ["y", "x"],
            (("x", 7, "y"), {}),
            id="constant between",
        ),
        pytest.param(
            closed((0, 0, 0), constants={1: None}),
            ["i__1", "i__0"],
            (("i__0", None, "i__1"), {}),
            id="numbers leave constants out",
        ),
        pytest.param(
            closed(({"a": 0, "b": 0}, {"b": 0}), names=["d", "e"]),
            ["ARGS[1][b]", "a", "ARGS[0][b]"],
            (({"a": "a", "b": "ARGS[0][b]"}, {"b": "ARGS[1][b]"}), {}),
            id="key that is there twice",
        ),
        pytest.param(
            closed((0, {"x": 0}), names=["x", "d"]),
            ["ARGS[1][x]", "x"],
            (("x", {"x": "ARGS[1][x]"}), {}),
            id="argument before key",
        ),
        pytest.param(
            closed((0, 0), names=["i__1", "i__0"]),
            ["i__0", "i__1"],
            (("i__1", "i__0"), {}),
            id="argument before number",
        ),
    ],
)
def test_program_gets_its_own_tree(signature: Signature, names: list[str], received: Any) -> None:
    """A program is called with its own tree, for any order of names."""
    assert called_closed(signature, names) == received


def test_dicts_of_a_program_keep_their_order() -> None:
    """Keys of dicts keep the order of the exported tree, which torch.export checks."""
    args, _ = called_closed(TREE, ["ARGS[1][a][1]", "ARGS[1][a][0]", "z", "scale", "x"])

    assert list(args[1]) == ["z", "a"]


@pytest.mark.parametrize(
    ("signature", "names", "said"),
    [
        pytest.param(
            closed((0, 0), names=["x", "y"]),
            ["x"],
            ["the inputs x do not feed each tensor of forward(x, y) once", "expected 2 inputs"],
            id="one left out",
        ),
        pytest.param(
            closed((0, 0), names=["x", "y"]),
            ["x", "mask"],
            ["the inputs x, mask do", "names among ARGS[0], ARGS[1], INPUT__0, INPUT__1."],
            id="unknown",
        ),
        pytest.param(closed((0, 0)), ["a", "b"], ["the inputs a, b do not"], id="order is no name"),
        pytest.param(closed((0,)), ["a", "b"], ["expected 1 inputs"], id="one too many"),
        pytest.param(closed((0, 0)), ["i__0", "i__2"], ["i__0, i__2"], id="out of range"),
        pytest.param(closed((0, 0)), ["a__0", "b__0"], ["a__0, b__0"], id="number twice"),
        pytest.param(
            closed((0, 0)), ["ARGS[0]", "i__0"], ["ARGS[0], i__0"], id="path and its number"
        ),
        pytest.param(
            closed((0, 0), names=["x", "y"], constants={1: 3}),
            ["x", "ARGS[1]"],
            ["the inputs x, ARGS[1]", "expected 1 inputs with names among ARGS[0], INPUT__0."],
            id="constant",
        ),
        pytest.param(
            TREE,
            ["x", "a", "z", "scale", "i__3"],
            ["forward(x, extra, *, scale)", "ARGS[1][z], ARGS[1][a][0]"],
            id="key of a list",
        ),
        pytest.param(closed((0, 0)), ["i__0", "i__0"], ["the same name twice"], id="name twice"),
    ],
)
def test_program_without_all_inputs(
    signature: Signature, names: list[str], said: list[str]
) -> None:
    """Each tensor of a program needs one input; the error lists the valid names."""
    with pytest.raises(BindingError) as raised:
        binding.bind_inputs(build.MODEL, names, signature)

    assert str(raised.value).startswith("model 'digits': the inputs ")
    assert all(part in str(raised.value) for part in said)


def test_input_of_a_program_cannot_be_optional() -> None:
    """An optional input of a program is rejected: programs have no defaults."""
    with pytest.raises(BindingError) as raised:
        binding.bind_inputs(build.MODEL, ["x", "y"], closed((0, 0), names=["x", "y"]), ["y"])

    assert "'digits': input y is optional, and forward(x, y) has no defaults" in str(raised.value)
    assert "Remove `optional`" in str(raised.value)


@pytest.mark.parametrize(
    ("signature", "names"),
    [
        pytest.param(TREE, ["x", "z", "ARGS[1][a][0]", "ARGS[1][a][1]", "scale"], id="nested"),
        pytest.param(closed((0, 0)), ["arg0", "arg1"], id="positions"),
        pytest.param(
            closed(({"b": 0}, {"b": 0})), ["ARGS[0][b]", "ARGS[1][b]"], id="key that is there twice"
        ),
    ],
)
def test_leaf_has_a_shortest_name(signature: Signature, names: list[str]) -> None:
    """leaf_name() returns the shortest name, which binds to the same leaf."""
    found = [binding.leaf_name(number, signature) for number in range(len(names))]

    assert found == names
    assert binding.bind_inputs(build.MODEL, found, signature).names == tuple(names)
