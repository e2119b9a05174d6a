"""The signature of forward() from Python, a TorchScript schema or an exported call tree."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend.signature import introspection
from torch_py_backend.signature.binding import Argument, Passing, Signature, Takes


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
    (argument,) = introspection.of_function(function(signature, before)).arguments
    return argument


# --- Python ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signature", "arguments"),
    [
        pytest.param("x", [("x", True, Passing.POSITIONAL, "x")], id="plain"),
        pytest.param(
            "x, y=None",
            [("x", True, Passing.POSITIONAL, "x"), ("y", False, Passing.POSITIONAL, "y=None")],
            id="default",
        ),
        pytest.param(
            "x, /, *, y, z=1",
            [
                ("x", True, Passing.POSITIONAL, "x"),
                ("y", True, Passing.KEYWORD, "y"),
                ("z", False, Passing.KEYWORD, "z=1"),
            ],
            id="keyword-only",
        ),
        pytest.param("*xs", [("xs", False, Passing.REST, "*xs")], id="*"),
        pytest.param("**xs", [("xs", False, Passing.REST_BY_NAME, "**xs")], id="**"),
        pytest.param("", [], id="none"),
    ],
)
def test_arguments_are_those_of_the_signature(
    signature: str, arguments: list[tuple[str, bool, Passing, str]]
) -> None:
    """Name, kind, default and declaration of each argument are read."""
    found = introspection.of_function(function(signature)).arguments

    assert [(one.name, one.required, one.passing, one.text) for one in found] == arguments
    assert {one.takes for one in found} <= {Takes.TENSOR}


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"], ids=["", "future"])
@pytest.mark.parametrize(
    ("annotation", "takes"),
    [
        ("Tensor", Takes.TENSOR),
        ("torch.Tensor", Takes.TENSOR),
        ("Any", Takes.TENSOR),
        ("DictLike", Takes.TENSOR),
        ("dict", Takes.DICT),
        ("dict[str, Tensor]", Takes.DICT),
        ("Dict[str, Tensor]", Takes.DICT),
        ("typing.Dict[str, Tensor]", Takes.DICT),
        ("Dict", Takes.DICT),
        ("Mapping[str, Tensor]", Takes.DICT),
        ("MutableMapping[str, Tensor]", Takes.DICT),
        ("typing.Mapping[str, Tensor]", Takes.DICT),
        ("list", Takes.LIST),
        ("list[Tensor]", Takes.LIST),
        ("List[Tensor]", Takes.LIST),
        ("Sequence[Tensor]", Takes.LIST),
        ("Iterable[Tensor]", Takes.LIST),
        ("tuple", Takes.TUPLE),
        ("tuple[Tensor, Tensor]", Takes.TUPLE),
        ("Tuple[Tensor, ...]", Takes.TUPLE),
        ("int", Takes.INT),
        ("float", Takes.FLOAT),
        ("bool", Takes.BOOL),
        ("str", Takes.STR),
        ("list[str]", Takes.STRINGS),
        ("List[str]", Takes.STRINGS),
        ("Sequence[str]", Takes.STRINGS),
        ("list[bytes]", Takes.BYTES),
        ("list[list[str]]", Takes.NESTED_STRINGS),
        ("List[List[List[str]]]", Takes.NESTED_STRINGS),
        ("list[list[bytes]]", Takes.NESTED_BYTES),
        ("list[list[Tensor]]", Takes.LIST),
        ("Union[int, str]", Takes.TENSOR),
        ("Annotated[int, 'pixels', []]", Takes.INT),
        ("typing.Annotated[Annotated[list[str], 1], 2]", Takes.STRINGS),
        ("Annotated[Tensor, 'batch']", Takes.TENSOR),
        ("Literal['a', 'b']", Takes.STR),
        ("typing.Literal[1, 2]", Takes.INT),
        ("Literal[True]", Takes.BOOL),
        ("Literal[1, True]", Takes.TENSOR),
        ("Union[Literal[1], int]", Takes.INT),
        ("Union[Annotated[int, 1], Literal[2]]", Takes.INT),
        ("[Tensor, int]", Takes.TENSOR),
        ("'int'", Takes.INT),
        ("Keys", Takes.DICT),
    ],
)
def test_type_of_an_argument(annotation: str, takes: Takes, future: str) -> None:
    """Containers, Python types and lists of strings are recognized in all spellings."""
    argument = only(f"x: {annotation}", future)

    assert argument.takes is takes
    assert not argument.nullable


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"], ids=["", "future"])
@pytest.mark.parametrize(
    ("annotation", "takes"),
    [
        ("Optional[Tensor]", Takes.TENSOR),
        ("Tensor | None", Takes.TENSOR),
        ("None | Tensor", Takes.TENSOR),
        ("Union[Tensor, None]", Takes.TENSOR),
        ("Optional[int]", Takes.INT),
        ("str | None", Takes.STR),
        ("list[str] | None", Takes.STRINGS),
        ("Optional[Dict[str, Tensor]]", Takes.DICT),
        ("Tensor | int | None", Takes.TENSOR),
        ("Optional[Annotated[int, 1]]", Takes.INT),
        ("Annotated[Optional[float], 1]", Takes.FLOAT),
        ("Literal['a', 'b'] | None", Takes.STR),
        ("Literal['a', None]", Takes.STR),
        ("Optional[Keys]", Takes.DICT),
    ],
)
def test_optional_argument_may_be_none(annotation: str, takes: Takes, future: str) -> None:
    """The type inside Optional is used, and None is allowed."""
    argument = only(f"x: {annotation}", future)

    assert argument.takes is takes
    assert argument.nullable
    assert argument.required


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"], ids=["", "future"])
@pytest.mark.parametrize(
    ("signature", "by_name"),
    [
        pytest.param(
            "x, **rest: Unpack[Rest]", {"steps": Takes.INT, "y": Takes.TENSOR}, id="unpacked"
        ),
        pytest.param(
            "x, generation_config: Optional[GenerationConfig] = None, **kwargs",
            {"max_new_tokens": Takes.VALUE, "temperature": Takes.VALUE},
            id="generation-config",
        ),
        pytest.param("x, generation_config: GenerationConfig", {}, id="no-rest"),
        pytest.param("x, generation_config=None, **kwargs", {}, id="another-config"),
        pytest.param("x, **kwargs: int", {}, id="not-unpacked"),
    ],
)
def test_names_of_keyword_arguments(signature: str, by_name: dict[str, Takes], future: str) -> None:
    """The names of `**` are read from a TypedDict, and for generate() of transformers."""
    before = f"""{future}
from typing_extensions import TypedDict, Unpack
class Rest(TypedDict, total=False):
    steps: int
    y: "torch.Tensor"
class GenerationConfig:
    def __init__(self):
        self.max_new_tokens = self.temperature = None
"""
    assert introspection.of_function(function(signature, before)).by_name == by_name


_KEYS = """
from typing import Annotated, Optional
from typing_extensions import NotRequired, Required, TypedDict
from torch import Tensor

class Base(TypedDict):
    image: Tensor
    mask: Optional[Tensor]

class Batch(Base, total=False):
    ids: list[str]
    size: Required[Annotated[int, "pixels"]]

class Part(TypedDict):
    scale: NotRequired[float]
    {more}

def forward(batch: Batch, part: Optional[Part] = None, *rest: Batch): ...
"""


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"], ids=["", "future"])
@pytest.mark.parametrize(
    ("more", "last"),
    [
        ("y: Tensor", ("y", Takes.TENSOR, True, False)),
        ("y: 'Unknown'", ("y", Takes.TENSOR, True, False)),
        ("y: 'Optional[int]'", ("y", Takes.INT, True, True)),
    ],
    ids=["plain", "unknown", "text"],
)
def test_keys_of_a_typed_dict(
    future: str, more: str, last: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Type and requiredness of each key are read."""
    module = types.ModuleType("source_of_keys")
    monkeypatch.setitem(sys.modules, "source_of_keys", module)
    code = compile(future + _KEYS.format(more=more), "source", "exec", dont_inherit=True)
    exec(code, vars(module))

    first, second, rest = introspection.of_function(module.forward).arguments

    def told(argument: Argument) -> list[tuple[str, Takes, bool, bool]]:
        return [(one.name, one.takes, one.required, one.nullable) for one in argument.keys]

    assert told(first) == [
        ("image", Takes.TENSOR, True, False),
        ("mask", Takes.TENSOR, True, True),
        ("ids", Takes.STRINGS, False, False),
        ("size", Takes.INT, True, False),
    ]
    assert told(second) == [("scale", Takes.FLOAT, False, False), last]
    assert second.nullable
    assert rest.keys == ()


@pytest.mark.parametrize("stars", ["*", "**"])
@pytest.mark.parametrize("annotation", ["dict", "int", "list[str]"])
def test_annotation_of_star_args(stars: str, annotation: str) -> None:
    """An annotation of *args applies to each item."""
    assert only(f"{stars}x: {annotation}").takes is Takes.TENSOR


@pytest.mark.parametrize(
    ("annotation", "takes"),
    [
        ("Unknown", Takes.TENSOR),
        ("Dict[str, Unknown]", Takes.DICT),
        ("typing.Mapping[str, Unknown]", Takes.DICT),
        ("list[Unknown]", Takes.TENSOR),
    ],
)
def test_unresolvable_annotation(annotation: str, takes: Takes) -> None:
    """A name that only type checkers import does not fail the load."""
    assert only(f"x: {annotation}", "from __future__ import annotations").takes is takes


@pytest.mark.parametrize(
    ("annotation", "takes"),
    [("int", Takes.INT), ("list[str]", Takes.STRINGS), ("Optional[float]", Takes.FLOAT)],
)
def test_unknown_annotation_does_not_hide_the_others(annotation: str, takes: Takes) -> None:
    """An annotation that cannot be resolved does not affect other arguments."""
    forward = function(f"x: Unknown, y: {annotation}", "from __future__ import annotations")

    _, y = introspection.of_function(forward).arguments

    assert y.takes is takes


class Net(nn.Module):
    def forward(self, x: Tensor, *, n: int = 3) -> Tensor:
        return x * n


@pytest.mark.parametrize(
    "served",
    [
        pytest.param(Net().forward, id="method"),
        pytest.param(functools.partial(Net.forward, Net()), id="partial"),
    ],
)
def test_bound_arguments(served: Any) -> None:
    """`self` and the arguments of a partial are not inputs."""
    found = introspection.of_function(served).arguments

    assert [(one.name, one.takes) for one in found] == [("x", Takes.TENSOR), ("n", Takes.INT)]


def test_callable_object() -> None:
    """A callable object has the arguments of its __call__."""

    class Scale:
        def __call__(self, image: Tensor, by: float) -> Tensor:
            return image * by

    assert str(introspection.of_function(Scale())) == "forward(image: 'Tensor', by: 'float')"


@pytest.mark.parametrize("wrap", [functools.partial, lambda served: served], ids=["partial", ""])
def test_annotations_of_an_object_are_resolved(wrap: Any) -> None:
    """Text annotations are resolved where the call is defined, not where it is wrapped."""
    before = "from __future__ import annotations\nfrom typing import Optional as Maybe"
    forward = function("self, x: Maybe[int]", before)
    served = wrap(type("Served", (), {"__call__": forward})())

    (argument,) = introspection.of_function(served).arguments

    assert (argument.takes, argument.nullable) == (Takes.INT, True)


def test_function_without_a_signature() -> None:
    """For a built-in function without a signature, the error of inspect is raised."""
    with pytest.raises(ValueError, match="no signature"):
        introspection.of_function(torch.relu)


@pytest.mark.parametrize(
    "signature",
    ["x, y=None", "x, *, y", "x, *others, y", "*, y", "**more", "x: int = 3"],
)
def test_text_of_a_signature(signature: str) -> None:
    """The text of a signature is its declaration."""
    assert str(introspection.of_function(function(signature))) == f"forward({signature})"


# --- TorchScript -----------------------------------------------------------------------------


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Everything(nn.Module):
    def forward(
        self,
        x: Tensor,
        d: dict[str, Tensor],
        tensors: list[Tensor],
        t: tuple[Tensor, Tensor],
        maybe: Tensor | None,
        n: int,
        f: float = 2.0,
        flag: bool = False,
        word: str = "a",
        words: list[str] | None = None,
        rows: list[list[str]] | None = None,
        some: list[Tensor | None] | None = None,
    ) -> Tensor:
        return x


def test_schema() -> None:
    """Types and defaults are read from a TorchScript schema."""
    scripted: Any = torch.jit.script(Everything())

    found = introspection.of_schema(scripted.forward.schema).arguments

    assert [(one.name, one.takes, one.required, one.nullable) for one in found] == [
        ("x", Takes.TENSOR, True, False),
        ("d", Takes.DICT, True, False),
        ("tensors", Takes.LIST, True, False),
        ("t", Takes.TUPLE, True, False),
        ("maybe", Takes.TENSOR, True, True),
        ("n", Takes.INT, True, False),
        ("f", Takes.FLOAT, False, False),
        ("flag", Takes.BOOL, False, False),
        ("word", Takes.STR, False, False),
        ("words", Takes.STRINGS, False, True),
        ("rows", Takes.NESTED_STRINGS, False, True),
        ("some", Takes.LIST, False, True),
    ]
    assert all(one.passing is Passing.POSITIONAL for one in found)


def test_text_of_a_schema() -> None:
    """The text of an argument is that of TorchScript's schema."""
    scripted: Any = torch.jit.script(Everything())

    text = str(introspection.of_schema(scripted.forward.schema))

    assert text.startswith("forward(Tensor x, Dict(str, Tensor) d, Tensor[] tensors, (Tensor, ")
    assert "Tensor? maybe" in text


def test_traced_module_has_its_arguments() -> None:
    """A traced module keeps the names of its arguments."""
    traced: Any = torch.jit.trace(Net(), torch.ones(1, 2))

    found = introspection.of_schema(traced.forward.schema).arguments

    assert [(one.name, one.takes) for one in found] == [("x", Takes.TENSOR)]


# --- call trees ------------------------------------------------------------------------------


def of_tree(args: Any, kwargs: Any = None, **more: Any) -> Signature:
    return introspection.of_tree(
        pytree.tree_structure((args, kwargs or {})), **{"constants": {}, **more}
    )


@pytest.mark.parametrize(
    ("signature", "leaves", "text"),
    [
        pytest.param(of_tree((0,)), ("ARGS[0]",), "forward(arg0)", id="one"),
        pytest.param(of_tree((), {}), (), "forward()", id="none"),
        pytest.param(
            of_tree((0, 0), {"k": 0}, names=["x", "y", "k"]),
            ("ARGS[0]", "ARGS[1]", "KWARGS[k]"),
            "forward(x, y, *, k)",
            id="arguments",
        ),
        pytest.param(
            of_tree(({"z": 0, "a": [0, (0,)]},), {"k": {"b": 0}}, names=["x"]),
            ("ARGS[0][z]", "ARGS[0][a][0]", "ARGS[0][a][1][0]", "KWARGS[k][b]"),
            "forward(x, *, k)",
            id="nested",
        ),
        pytest.param(
            of_tree((Pair(0, 0), {3: 0}), names=["p"]),  # type: ignore[arg-type]
            ("ARGS[0][a]", "ARGS[0][b]", "ARGS[1][3]"),
            "forward(p, arg1)",
            id="fields and numbers",
        ),
        pytest.param(
            of_tree((0, 0, [0, 0]), constants={1: 5, 2: None}, names=["x", "n", "y"]),
            ("ARGS[0]", "ARGS[2][1]"),
            "forward(x, n, y)",
            id="constants",
        ),
    ],
)
def test_leaves_of_a_tree_have_paths(
    signature: Signature, leaves: tuple[str, ...], text: str
) -> None:
    """Each tensor of a program has a path; constants have none."""
    assert signature.leaves == leaves
    assert str(signature) == text


def test_tree_is_built_from_its_leaves() -> None:
    """unflatten() returns the program's containers, key order and constants."""
    signature = of_tree(
        ({"z": 0, "a": [0]}, 0, Pair(0, 0)),  # type: ignore[arg-type]
        {"k": 0},
        constants={2: 7},
    )

    assert signature.unflatten is not None
    args, kwargs = signature.unflatten(["z", "a", "first", "second", "k"])

    assert args == ({"z": "z", "a": ["a"]}, 7, Pair("first", "second"))  # type: ignore[arg-type]
    assert list(args[0]) == ["z", "a"]
    assert kwargs == {"k": "k"}


def test_kinds_of_parameters() -> None:
    """Each kind of parameter in Python is supported."""
    assert set(introspection._PASSING) == set(inspect._ParameterKind)


class _Yields:
    def __call__(self) -> Iterator[int]:
        yield 1


async def _awaited() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_Yields.__call__, True),
        (_Yields(), True),
        (_Yields().__call__, True),
        (functools.partial(_Yields.__call__, _Yields()), True),
        (torch.no_grad()(_Yields.__call__), True),
        (_awaited, True),
        (lambda: iter(()), False),
        (torch.add, False),
        (nn.Identity().forward, False),
    ],
    ids=["function", "object", "method", "partial", "decorated", "async", "lambda", "torch", "no"],
)
def test_yields(function: Any, expected: bool) -> None:
    """A generator is recognized for all wrappers and callables."""
    assert introspection.yields(function) is expected
