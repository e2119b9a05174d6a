import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import build
import pytest
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend.config.model_config import SequenceConfig
from torch_py_backend.errors import BindingError, LoadError
from torch_py_backend.signature import binding, introspection
from torch_py_backend.signature.arguments import ArgumentType, Signature
from torch_py_backend.signature.binding import InputBinding


def function(parameters: str) -> Callable[..., Any]:
    """Return a function with these parameters, which returns its arguments."""
    scope: dict[str, Any] = {"Tensor": Tensor}
    exec(f"def forward({parameters}): return locals()", scope)
    forward: Callable[..., Any] = scope["forward"]
    return forward


def scripted(parameters: str) -> Signature:
    """Return the signature of a TorchScript module with these parameters."""
    signature = introspection.from_function(function(parameters))
    return dataclasses.replace(signature, torchscript=True)


def tree(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
    constants: Mapping[int, Any] | None = None,
) -> Signature:
    """Return the signature of a program that was exported with such a tree."""
    spec = pytree.tree_structure((args, dict(kwargs or {})))
    return introspection.from_tree(spec, dict(constants or {}), names)


class Pair(NamedTuple):
    a: Any
    b: Any


SCRIPT = scripted("INPUT0, INPUT1")
TREE = tree((0, {"z": 0, "a": [0, 0]}), {"scale": 0}, ["x", "extra"])
TWO = tree((0, 0), names=["x", "y"])


def bound(signature: str | Signature, names: str) -> InputBinding:
    """Bind comma-separated names; `?` ends those that are left out, `!` those of sequences."""
    if isinstance(signature, str):
        signature = introspection.from_function(function(signature))
    listed = names.split(", ")
    left_out, sequence_inputs = (
        [name.rstrip(mark) for name in listed if name.endswith(mark)] for mark in "?!"
    )
    return binding.bind_inputs(
        [name.rstrip("?!") for name in listed],
        signature,
        left_out,
        sequence_inputs=sequence_inputs,
    )


def called(signature: str | Signature, names: str) -> str:
    """Return the arguments of forward() as text, without quotes; a column is its tensor's name."""
    inputs = bound(signature, names)
    sent = [name.rstrip("!") for name in names.split(", ") if not name.endswith("?")]
    assert sorted(inputs.names) == sorted(sent)
    assert len(inputs.types) == len(inputs.places) == len(inputs.names)
    if isinstance(signature, str):
        arguments = inputs.call(function(signature), inputs.names)
    else:
        assert set(inputs.types) == {ArgumentType.TENSOR}
        arguments = inputs.call(lambda *args, **named: (*args, named), inputs.names)
    return str(arguments).replace("'", "")


@pytest.mark.parametrize(
    ("signature", "names", "arguments"),
    [
        # by name
        ("x, y", "y, x", "{x: x, y: y}"),
        ("x, *, y, z=None", "y, x", "{x: x, y: y, z: None}"),
        ("**xs", "b, a-c, n__1", "{xs: {b: b, a-c: a-c, n__1: n__1}}"),
        ("x, *xs, y=None, **more", "w, y, x", "{x: x, y: y, xs: (), more: {w: w}}"),
        ("a__1, b__0", "a__1, b__0", "{a__1: a__1, b__0: b__0}"),
        # by number
        ("x, y", "a__1, b__00", "{x: b__00, y: a__1}"),
        ("*xs", "i__1, i__0", "{xs: (i__0, i__1)}"),
        ("x, y=None, *xs", "i__1, i__2, i__0", "{x: i__0, y: i__1, xs: (i__2,)}"),
        # by path
        ("x, y", "y, ARGS[0]", "{x: ARGS[0], y: y}"),
        ("x, *, y", "KWARGS[y], KWARGS[x]", "{x: KWARGS[x], y: KWARGS[y]}"),
        ("x, *, y: tuple", "x, KWARGS[y][0]", "{x: x, y: (KWARGS[y][0],)}"),
        ("x, **kw", "x, KWARGS[s]", "{x: x, kw: {s: KWARGS[s]}}"),
        (
            "x: tuple[Tensor, Tensor], y: list[Tensor]",
            "ARGS[1][0], ARGS[0][1], ARGS[0][0]",
            "{x: (ARGS[0][0], ARGS[0][1]), y: [ARGS[1][0]]}",
        ),
        # in the config's order
        ("x, y", "image, mask", "{x: image, y: mask}"),
        ("x, *xs", "b, a", "{x: b, xs: (a,)}"),
        # all in one argument
        ("x: list[Tensor]", "b, a", "{x: [b, a]}"),
        ("x: list[Tensor]", "ARGS[0][1], ARGS[0][0]", "{x: [ARGS[0][0], ARGS[0][1]]}"),
        ("x: list[Tensor]", "i__1, i__0", "{x: [i__0, i__1]}"),
        ("x: dict, scale=1.0", "i__1, b", "{x: {i__1: i__1, b: b}, scale: 1.0}"),
        ("x: dict[str, Tensor] | None = None", "x, a", "{x: {x: x, a: a}}"),
        ("x: dict", "ARGS[0][0]", "{x: {0: ARGS[0][0]}}"),
        ("p: dict", "ARGS[0][x], KWARGS[p][mask]", "{p: {x: ARGS[0][x], mask: KWARGS[p][mask]}}"),
        # inputs that are left out
        ("x, y=None, z=None", "x, y?, z", "{x: x, y: None, z: z}"),
        ("x, y: Tensor | None, z=3", "x, y?", "{x: x, y: None, z: 3}"),
        ("x: dict", "a?, b", "{x: {b: b}}"),
        ("x, y", "x, ARGS[1][a]?, ARGS[1][b]", "{x: x, y: {b: ARGS[1][b]}}"),
        # TorchScript's arguments get their tensors by one rule
        (SCRIPT, "INPUT1, INPUT0", "(INPUT0, INPUT1, {})"),
        (SCRIPT, "i__1, i__0", "(i__0, i__1, {})"),
        (SCRIPT, "image, mask", "(image, mask, {})"),
        (SCRIPT, "INPUT__1, image", "(INPUT__1, image, {})"),
        (SCRIPT, "INPUT1, image", "(INPUT1, image, {})"),
        (SCRIPT, "ARGS[1], INPUT0", "(INPUT0, ARGS[1], {})"),
        (scripted("a__1, b"), "b, a__1", "(a__1, b, {})"),
        (scripted("xs: dict[str, Tensor]"), "y, x__1", "({y: y, x__1: x__1}, {})"),
        # states and controls are bound by their own names, whatever the rule for the others is
        (SCRIPT, "image, i__1!", "(image, i__1, {})"),
        (SCRIPT, "image, i__0!", "(i__0, image, {})"),
        (SCRIPT, "INPUT0, i__1!", "(INPUT0, i__1, {})"),
        # a program gets its own tree
        (tree((0,)), "anything", "(anything, {})"),
        (TREE, "e, d, c, b, a", "(e, {z: d, a: [c, b]}, {scale: a})"),
        (tree((0,), {"b": 0, "a": 0}, ["x"]), "a, KWARGS[b], x", "(x, {b: KWARGS[b], a: a})"),
        # a key that occurs twice; an argument before a key, and before a number
        (
            tree(({"a": 0, "b": 0}, {"b": 0}), names=["d", "e"]),
            "ARGS[1][b], a, ARGS[0][b]",
            "({a: a, b: ARGS[0][b]}, {b: ARGS[1][b]}, {})",
        ),
        (tree((0, {"x": 0}), names=["x", "d"]), "ARGS[1][x], x", "(x, {x: ARGS[1][x]}, {})"),
        (tree((0, 0), names=["i__1", "i__0"]), "i__0, i__1", "(i__1, i__0, {})"),
        (
            tree((Pair(0, 0), {3: 0}), names=["p"]),
            "ARGS[0][b], ARGS[1][3], ARGS[0][a]",
            "(Pair(a=ARGS[0][a], b=ARGS[0][b]), {3: ARGS[1][3]}, {})",
        ),
        (
            tree((0, (1, 2)), constants={1: 5}, names=["x"]),
            "x, ARGS[1][1]",
            "(x, (5, ARGS[1][1]), {})",
        ),
    ],
)
def test_inputs_are_bound_by_name_path_or_number_else_in_order(
    signature: str | Signature, names: str, arguments: str
) -> None:
    assert called(signature, names) == arguments


@pytest.mark.parametrize(
    ("signature", "names", "message"),
    [
        ("x, **xs", "b", "no input feeds forward()'s argument x"),
        # unknown names
        ("x, y", "x, z", "has no z; expected names among x, y, INPUT__0, INPUT__1."),
        ("*xs", "i__0, i__1000000000000", "has no i__1000000000000;"),
        ("x, *, y", "i__0, i__1", "has no i__1; expected names among x, y, INPUT__0"),
        *(
            ("x, y", f"x, {name}", f"has no {name};")
            for name in ("ARGS[2]", "RESULT[0]", "ARGS", "ARGS[1", "ARGS[-1]", "KWARGS[z]")
        ),
        # more digits than Python reads, and more items than it follows
        ("x, y", f"x, i__{'9' * 5000}", "has no i__999"),
        ("x, y", f"x, ARGS[{'9' * 5000}]", "has no ARGS[999"),
        ("x, y", f"x, ARGS[1]{'[0]' * 3000}", "has no ARGS[1][0]"),
        ("x, y", "a, b, c", "forward(x, y) has no c; expected names among x, y"),
        # names of one leaf
        ("x, y", "a__0, b__0", "a__0, b__0 feed the same argument; expected one input for each"),
        ("x, y", "x, x", "x, x feed the same argument"),
        ("x, y", "ARGS[0], ARGS[0][a], y", "feed an argument and a part of it at once"),
        # gaps
        ("x, y", "x, ARGS[1][0], ARGS[1][2]", "leave gaps in a list; expected items 0 to 1"),
        ("x: list[Tensor]", "a, b?, c", "a, c leave gaps in a list"),
        ("x, y=None, *xs, **kw", "x, i__2", "leave a gap before them"),
        # TorchScript
        (SCRIPT, "i__0, i__2", "has no i__2; expected names among INPUT0"),
        (SCRIPT, "ARGS[0], mask", "has no mask"),
        # a program, each of whose tensors needs one input
        (TWO, "x", "no input feeds forward()'s argument y; expected inputs for forward(x, y)"),
        (TWO, "x, mask", "no mask; expected names among x, y, INPUT__0, INPUT__1."),
        (tree((0, 0), constants={1: 3}), "arg0, ARGS[1]", "names among arg0, INPUT__0."),
        (
            TREE,
            "x, a, z, scale, i__3",
            "forward(x, z, ARGS[1][a][0], ARGS[1][a][1], scale) has no a",
        ),
        (TWO, "x, y?", "argument y; y cannot be optional"),
    ],
)
def test_unknown_names_gaps_and_two_inputs_of_one_leaf_are_refused(
    signature: str | Signature, names: str, message: str
) -> None:
    with pytest.raises(BindingError) as raised:
        bound(signature, names)
    assert isinstance(raised.value, LoadError)
    assert message in str(raised.value)


def test_only_the_configs_order_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    for names in ("x, y", "i__1, i__0", "ARGS[1], KWARGS[x]", "image, mask?"):
        bound("x, y=None", names)
    assert caplog.messages == []
    bound("x, y=None", "image, mask")
    (message,) = caplog.messages
    assert "the input names image, mask are not all arguments of forward(x, y" in message


def test_column_has_the_type_of_its_argument_and_parts_are_tensors() -> None:
    parameters = "n: int, ss: list[str], d: dict, x: tuple, *rest, more: list, **others"
    names = "ss, n, ARGS[2][x], ARGS[3][0], ARGS[4], more, w"
    inputs = bound(parameters, names)
    columns = dict(zip(inputs.names, zip(inputs.types, inputs.places, strict=True), strict=True))
    assert columns == {
        "n": (ArgumentType.INT, "n"),
        "ss": (ArgumentType.STRINGS, "ss"),
        "ARGS[2][x]": (ArgumentType.TENSOR, "d[x]"),
        "ARGS[3][0]": (ArgumentType.TENSOR, "x[0]"),
        "ARGS[4]": (ArgumentType.TENSOR, "*4"),
        "more": (ArgumentType.TENSOR, "more"),
        "w": (ArgumentType.TENSOR, "w"),
    }


@pytest.mark.parametrize(
    ("parameters", "controls", "taken"),
    [
        ("x, total, READY", "START, READY, CORRID", ["READY"]),
        ("x, total, READY", "READY__2, CORRID__3", ["READY__2"]),
        ("inputs: dict[str, Tensor]", "START, READY, CORRID", ["START", "READY", "CORRID"]),
        ("tensors: list[Tensor]", "START, READY, CORRID", []),
    ],
    ids=["name", "number", "dict", "list"],
)
def test_controls_are_taken_by_name_or_number(
    parameters: str, controls: str, taken: list[str]
) -> None:
    specs = tuple(map(build.spec, controls.split(", ")))
    config = build.config(inputs=(), sequencing=SequenceConfig(5.0, specs, (), True, 8))
    signature = introspection.from_function(function(parameters))
    assert [spec.name for spec in binding.with_controls(config, signature).inputs] == taken
