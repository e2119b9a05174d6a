from __future__ import annotations

import functools
import itertools
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.signature import introspection
from torch_py_backend.signature.arguments import Argument, ArgumentType, Passing


def function(signature: str, before: str = "") -> Any:
    """Return a function with this signature, from its own source."""
    module = types.ModuleType("source_of_a_signature")
    lines = [
        before,
        "import collections.abc, typing",
        "from collections.abc import Iterable, Mapping, MutableMapping, Sequence",
        "from typing import Annotated, Any, Dict, List, Literal, Optional, Tuple, TypedDict, Union",
        "import torch",
        "from torch import Tensor",
        "class DictLike: ...",
        "class Keys(TypedDict): x: Tensor",
        f"def forward({signature}): ...",
    ]
    code = compile("\n".join(lines), "source", "exec", dont_inherit=True)
    exec(code, vars(module))
    return module.forward


def only(signature: str, before: str = "") -> Argument:
    (argument,) = introspection.from_function(function(signature, before)).arguments
    return argument


def test_arguments_are_those_of_the_signature() -> None:
    for text in ("x, y=None", "x, *, y", "x, *others, y", "*, y", "**more", "x: int = 3", ""):
        assert str(introspection.from_function(function(text))) == f"forward({text})"
    read = introspection.from_function(function("x, /, y=None, *xs, z")).arguments
    assert [(entry.name, entry.required, entry.passing) for entry in read] == [
        ("x", True, Passing.POSITIONAL_ONLY),
        ("y", False, Passing.POSITIONAL_OR_KEYWORD),
        ("xs", False, Passing.VAR_POSITIONAL),
        ("z", True, Passing.KEYWORD_ONLY),
    ]
    assert {entry.type for entry in read} == {ArgumentType.TENSOR}
    with pytest.raises(ValueError, match="no signature"):
        introspection.from_function(torch.relu)


FUTURE = ("", "from __future__ import annotations")

ANNOTATIONS = {
    ArgumentType.TENSOR: "Any; DictLike; Union[int, str]; Literal[1, True]; [Tensor, int];"
    " Tensor | None; None | Tensor; Tensor | int | None",
    ArgumentType.DICT: "dict; Dict[str, Tensor]; Mapping[str, Tensor]; MutableMapping[str, Tensor];"
    " Keys; Optional[Dict[str, Tensor]]; Optional[Keys]",
    ArgumentType.LIST: "list; list[Tensor]; Sequence[Tensor]; Iterable[Tensor]; list[list[Tensor]]",
    ArgumentType.TUPLE: "tuple[Tensor, Tensor]; Tuple[Tensor, ...]",
    ArgumentType.INT: "int; 'int'; Annotated[int, 'pixels', []]; Union[Literal[1], int]",
    ArgumentType.FLOAT: "float; Annotated[Optional[float], 1]",
    ArgumentType.BOOL: "bool",
    ArgumentType.STR: "str; Literal['a', 'b']; Literal['a', None]",
    ArgumentType.STRINGS: "list[str]; Sequence[str]; list[str] | None;"
    " typing.Annotated[Annotated[list[str], 1], 2]",
    ArgumentType.BYTES: "list[bytes]",
    ArgumentType.NESTED_STRINGS: "list[list[str]]; List[List[List[str]]]",
    ArgumentType.NESTED_BYTES: "list[list[bytes]]",
    ArgumentType.RAW: "bytes",
}


@pytest.mark.parametrize(
    ("takes", "texts"), ANNOTATIONS.items(), ids=[takes.name for takes in ANNOTATIONS]
)
def test_types_are_recognized_in_all_spellings(takes: ArgumentType, texts: str) -> None:
    for annotation, future in itertools.product(texts.split("; "), FUTURE):
        argument = only(f"x: {annotation}", future)
        assert argument.type is takes
        assert argument.nullable is ("None" in annotation or "Optional" in annotation)
        assert argument.required


def test_unknown_annotations_neither_fail_nor_hide_others() -> None:
    for signature in ("*x: dict", "**x: list[str]"):
        assert only(signature).type is ArgumentType.TENSOR
    for annotation, takes in (
        ("Unknown", ArgumentType.TENSOR),
        ("typing.Mapping[str, Unknown]", ArgumentType.DICT),
        ("list[Unknown]", ArgumentType.LIST),
    ):
        source = function(f"x: {annotation}, y: list[str]", FUTURE[1])
        x, y = introspection.from_function(source).arguments
        assert (x.type, y.type) == (takes, ArgumentType.STRINGS)


class Net(nn.Module):
    def forward(self, x: Tensor, *, n: int = 3) -> Tensor:
        return x * n


def test_arguments_that_are_bound_already_are_no_inputs() -> None:
    for served in (Net().forward, functools.partial(Net.forward, Net())):
        signature = introspection.from_function(served)
        assert str(signature) == "forward(x: Tensor, *, n: int = 3)"
        types = [entry.type for entry in signature.arguments]
        assert types == [ArgumentType.TENSOR, ArgumentType.INT]
    before = FUTURE[1] + "\nfrom typing import Optional as Maybe"
    forward = function("self, x: Maybe[int]", before)
    served = type("Served", (), {"__call__": forward})()
    for wrapped in (served, functools.partial(served)):
        (argument,) = introspection.from_function(wrapped).arguments
        assert (argument.type, argument.nullable) == (ArgumentType.INT, True)


def test_types_and_defaults_are_read_from_a_schema() -> None:
    schema = torch._C.parse_schema(
        "forward(Any self, Tensor x, Dict(str, Tensor) d, (Tensor, Tensor) t, Tensor? maybe,"
        " int n=2, str[]? words=None, *, str[][] rows) -> Tensor"
    )
    signature = introspection.from_schema(schema)
    assert [
        (one.name, one.type.name, one.required, one.nullable) for one in signature.arguments
    ] == [
        ("x", "TENSOR", True, False),
        ("d", "DICT", True, False),
        ("t", "TUPLE", True, False),
        ("maybe", "TENSOR", True, True),
        ("n", "INT", False, False),
        ("words", "STRINGS", False, True),
        ("rows", "NESTED_STRINGS", True, False),
    ]
    *others, last = [one.passing for one in signature.arguments]
    assert {*others} == {Passing.POSITIONAL_OR_KEYWORD}
    assert last is Passing.KEYWORD_ONLY
    assert str(signature).startswith("forward(x: Tensor, d: Dict[str, Tensor], t: Tuple[Tensor")
