"""Check, decode, group and convert items."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Optional, Tuple  # noqa: UP035

import build
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.gather_scatter import Item
from torch_py_backend.batching.grouping import Grouping
from torch_py_backend.batching.padding import Padding
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.config.sequence_config import SequenceConfig, State
from torch_py_backend.errors import BindingError, InputError
from torch_py_backend.signature import introspection


def optional(spec: TensorSpec) -> TensorSpec:
    return dataclasses.replace(spec, optional=True)


def grouping_of(forward: Callable[..., Any], *specs: TensorSpec, **overrides: Any) -> Grouping:
    config = build.config(inputs=specs, **overrides)
    return Grouping(config, introspection.from_function(forward))


def received(grouping: Grouping, forward: Callable[..., Any], *items: Item) -> list[Any]:
    """Return the arguments of each call of forward() for these items."""
    admitted = [grouping.admit(item) for item in items]
    sound = [(n, item) for n, item in enumerate(admitted) if isinstance(item, dict)]
    assert len(sound) == len(items)
    result = []
    for group in grouping.group(sound):
        batch = gather_scatter.gather(group.items, group.inputs.names)
        result.append(group.inputs.call(forward, grouping.convert(group.inputs, batch.columns)))
    return result


def positions(grouping: Grouping, *items: Item) -> list[list[int]]:
    """Return the positions of the items of each call."""
    return [list(group.positions) for group in grouping.group(list(enumerate(items)))]


def texts(*rows: Any) -> Any:
    return np.array(rows, dtype=np.object_)


def identity(x: Any) -> Any:
    return x


def two(x: Any, y: Any = None) -> Any:
    return x, y


def pair(x: Any, n: Any) -> Any:
    return x, n


X, Y = build.spec("x"), build.spec("y")


# --- admission -------------------------------------------------------------------------------


def test_valid_item_is_unchanged() -> None:
    """An item that needs no changes is not copied."""
    item: Item = {"x": torch.ones(2, 4)}

    assert grouping_of(identity, X).admit(item) is item


@pytest.mark.parametrize(
    ("item", "message"),
    [
        pytest.param({}, "the request lacks the input 'x'", id="nothing"),
        pytest.param({"x": torch.ones(1, 4)}, "the request lacks the input 'n'", id="one of two"),
        pytest.param(
            {"x": torch.ones(2, 4), "n": torch.ones(3, 4)},
            "the request's inputs have 2 and 3 rows; expected the same number of rows in each",
            id="rows",
        ),
        pytest.param(
            {"x": torch.ones(0, 4), "n": torch.ones(1, 4)},
            "the request's inputs have 0 and 1 rows",
            id="no rows and one",
        ),
    ],
)
def test_invalid_item_is_refused(item: Item, message: str) -> None:
    """A request without an input, or with inputs of different rows, is refused alone."""
    result = grouping_of(pair, X, build.spec("n")).admit(item)

    assert isinstance(result, InputError)
    assert result.code == "INVALID_ARG"
    assert str(result).startswith(f"model 'digits': {message}")


@pytest.mark.parametrize("shape", [(4,), (), (1, 4, 1)], ids=str)
@pytest.mark.parametrize("specs", [(X,), (dataclasses.replace(X, dims=(-1,)),)], ids=["4", "-1"])
def test_item_without_rows(specs: tuple[TensorSpec], shape: tuple[int, ...]) -> None:
    """Triton drops the first dimension of a request with 0 rows: it is refused before batching."""
    grouping = grouping_of(identity, *specs)
    item: Item = {"x": np.ones(shape, dtype=np.float32)}

    refused = grouping.admit(item)

    assert isinstance(refused, InputError)
    assert f"input 'x' has the shape {list(shape)} and no rows" in str(refused)
    assert grouping.single_group([{"x": torch.ones(2, 4)}, item]) is None


def test_padded_item_without_rows() -> None:
    """It is refused before a mask is created for it."""
    specs = [dataclasses.replace(build.spec(name, "INT64", (-1,)), ragged=True) for name in "xn"]
    specs[1] = optional(specs[1])
    config = build.config(inputs=tuple(specs), pad={"x": {"mask": "n"}})
    grouping = Grouping(config, introspection.from_function(pair), Padding(config))

    assert isinstance(grouping.admit({"x": np.ones(3, dtype=np.int64)}), InputError)


def test_no_rows_without_a_batch_dimension() -> None:
    """With max_batch_size 0 the first dimensions may differ."""
    item: Item = {"x": torch.ones(2), "n": torch.tensor(3.0)}

    assert grouping_of(pair, X, build.spec("n"), max_batch_size=0).admit(item) is item


def test_optional_input_without_a_default_is_refused_at_load() -> None:
    """An optional input that forward() requires fails the load."""
    with pytest.raises(BindingError, match="argument n; n cannot be optional"):
        grouping_of(pair, X, optional(build.spec("n")))


# --- optional inputs -------------------------------------------------------------------------


def test_items_are_grouped_by_what_they_have() -> None:
    """Items with and without an optional input are different calls."""
    grouping = grouping_of(two, X, optional(Y))
    with_y: Item = {"y": torch.full((1, 4), 5.0), "x": torch.zeros(1, 4)}
    without: Item = {"x": torch.ones(2, 4)}

    assert positions(grouping, with_y, without, with_y, without) == [[0, 2], [1, 3]]
    (x, y), (alone, nothing) = received(grouping, two, with_y, without)
    assert (x.tolist(), y.tolist()) == (with_y["x"].tolist(), with_y["y"].tolist())
    assert alone is without["x"]
    assert nothing is None


def test_different_patterns_are_kept_apart() -> None:
    """Items that lack different inputs do not share a call."""

    def forward(x: Any, a: Any = "a", b: Any = "b") -> Any:
        return x, a, b

    grouping = grouping_of(forward, X, optional(build.spec("a")), optional(build.spec("b")))
    value = torch.ones(1, 4)

    result = received(grouping, forward, {"x": value, "a": value}, {"x": value, "b": value})

    assert [(a is value, b is value) for _, a, b in result] == [(True, False), (False, True)]
    assert (result[0][2], result[1][1]) == ("b", "a")


def test_gap_in_a_list_is_refused_before_the_call() -> None:
    """The last parts of a list may be left out; a request that leaves a gap is refused."""

    def forward(tensors: list[Tensor]) -> Any:
        return tensors

    specs = [build.spec("a"), optional(build.spec("b")), optional(build.spec("c"))]
    grouping = grouping_of(forward, *specs)
    value = torch.ones(1, 4)

    assert set(grouping.patterns) == {frozenset(), frozenset("c"), frozenset("bc")}
    refusal = grouping.admit({"a": value, "c": value})
    assert isinstance(refusal, InputError)
    assert "a, c leave gaps in a list" in str(refusal)
    assert received(grouping, forward, {"a": value, "b": value}) == [[value, value]]


def test_input_that_only_leaves_gaps_is_refused_at_load() -> None:
    """An optional input that can never be left out fails the load."""

    def forward(tensors: list[Tensor]) -> Any: ...

    with pytest.raises(BindingError, match="a, c leave gaps in a list"):
        grouping_of(forward, build.spec("a"), optional(build.spec("b")), build.spec("c"))


def test_parts_of_a_tuple_are_left_out_together() -> None:
    """An Optional[Tuple[Tensor, Tensor]] takes two optional inputs: both or neither."""

    def forward(x: Tensor, state: Optional[Tuple[Tensor, Tensor]] = None) -> Any:  # noqa: UP006, UP045
        return x, state

    names = ("ARGS[1][0]", "ARGS[1][1]")
    grouping = grouping_of(forward, X, *(optional(build.spec(name)) for name in names))
    value = torch.ones(1, 4)

    assert set(grouping.patterns) == {frozenset(), frozenset(names)}
    complete: Item = {"x": value, names[0]: value, names[1]: value}
    assert received(grouping, forward, complete, {"x": value}) == [
        (value, (value, value)),
        (value, None),
    ]
    for name in names:
        refusal = grouping.admit({"x": value, name: value})
        assert isinstance(refusal, InputError)
        assert "is a tuple" in str(refusal)
        assert "all of ARGS[1][0], ARGS[1][1], or none of them" in str(refusal)


# --- groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "groups"),
    [
        pytest.param([(1, 2)], [[0]], id="one"),
        pytest.param([(1, 2), (3, 2), (2, 2)], [[0, 1, 2]], id="alike"),
        pytest.param(
            [(1, 2), (1, 3), (1, 2), (1, 4), (1, 3)], [[0, 2], [1, 4], [3]], id="three shapes"
        ),
        pytest.param([(2,), (2, 1)], [[0], [1]], id="number of dimensions"),
        pytest.param([(0, 2), (1, 2)], [[0, 1]], id="no rows"),
    ],
)
def test_items_of_one_shape_form_a_group(
    shapes: list[tuple[int, ...]], groups: list[list[int]]
) -> None:
    """Items are batched with those of their shape, in order."""
    items: list[Item] = [{"x": torch.ones(shape)} for shape in shapes]
    assert positions(grouping_of(identity, X), *items) == groups


def test_any_input_separates_items() -> None:
    """Items that differ in the shape or device of one input do not share a call."""
    grouping = grouping_of(pair, X, build.spec("n"))
    first: Item = {"x": torch.ones(1, 2), "n": torch.ones(1, 2)}
    second: Item = {**first, "n": torch.ones(1, 3)}
    third: Item = {**first, "x": torch.ones(1, 2, device="meta")}

    assert positions(grouping, first, second, third, first) == [[0, 3], [1], [2]]


# --- scalars ---------------------------------------------------------------------------------


def power(x: Any, n: int) -> Any:
    return x, n


def factor(x: Any, n: float) -> Any:
    return x, n


def flag(x: Any, n: bool) -> Any:
    return x, n


def unit(x: Any, n: str) -> Any:
    return x, n


@pytest.mark.parametrize(
    ("forward", "dtype", "column", "value"),
    [
        pytest.param(power, "INT32", torch.tensor([[3], [3]], dtype=torch.int32), 3, id="int"),
        pytest.param(factor, "FP32", torch.tensor([[0.5], [0.5]]), 0.5, id="float"),
        pytest.param(factor, "BF16", torch.full((2, 1), 0.5, dtype=torch.bfloat16), 0.5, id="BF16"),
        pytest.param(flag, "BOOL", torch.tensor([[True], [True]]), True, id="bool"),
        pytest.param(unit, "BYTES", texts([b"m\xc3\xa4"], [b"m\xc3\xa4"]), "mä", id="str"),
        pytest.param(power, "INT64", torch.tensor([[3, 3], [3, 3]]), 3, id="several alike a row"),
    ],
)
def test_scalar_is_one_python_value(
    forward: Callable[..., Any], dtype: str, column: Any, value: Any
) -> None:
    """An argument annotated as a number or a string gets one value for all rows."""
    grouping = grouping_of(forward, X, build.spec("n", dtype, (1,)))

    ((_, result),) = received(grouping, forward, {"x": torch.ones(2, 4), "n": column})

    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("forward", "dtype", "column", "message"),
    [
        pytest.param(power, "INT64", torch.tensor([[3], [4]]), "holds 2 values", id="ints"),
        pytest.param(
            unit,
            "BYTES",
            texts([b"a"], [b"b"]),
            "one value for all rows: forward() takes a str",
            id="strings",
        ),
        pytest.param(flag, "BOOL", torch.tensor([[True], [False]]), "takes a bool", id="bools"),
        pytest.param(power, "INT64", torch.ones(2, 0, dtype=torch.int64), "holds 0", id="none"),
    ],
)
def test_scalar_of_several_values_is_refused(
    forward: Callable[..., Any], dtype: str, column: Any, message: str
) -> None:
    """Rows with different values for a scalar are refused."""
    grouping = grouping_of(forward, X, build.spec("n", dtype, (-1,)))

    result = grouping.admit({"x": torch.ones(2, 4), "n": column})

    assert isinstance(result, InputError)
    assert "'digits': input 'n' holds " in str(result)
    assert message in str(result)


@pytest.mark.parametrize(
    ("forward", "dtype"),
    [
        pytest.param(power, "FP32", id="floats for an int"),
        pytest.param(power, "BYTES", id="strings for an int"),
        pytest.param(flag, "BYTES", id="strings for a bool"),
        pytest.param(flag, "FP32", id="floats for a bool"),
        pytest.param(unit, "FP32", id="floats for a str"),
    ],
)
def test_scalar_of_another_type_is_refused_at_load(forward: Callable[..., Any], dtype: str) -> None:
    """A type that an argument cannot take without loss fails the load."""
    with pytest.raises(BindingError):
        grouping_of(forward, X, build.spec("n", dtype, (1,)))


def test_scalars_separate_items() -> None:
    """Items with different scalars are different calls; items with equal ones share a call."""
    grouping = grouping_of(power, X, build.spec("n", "INT64", (1,)))
    items: list[Item] = [
        {"x": torch.ones(1, 4), "n": torch.full((1, 1), number)} for number in (2, 3, 2)
    ]

    assert positions(grouping, *items) == [[0, 2], [1]]
    assert [number for _, number in received(grouping, power, *items)] == [2, 3]


def test_nan_is_one_value() -> None:
    """NaN in all rows counts as one value."""
    grouping = grouping_of(factor, X, build.spec("n", "FP32", (1,)))

    result = grouping.admit({"x": torch.ones(2, 4), "n": torch.full((2, 1), float("nan"))})

    assert isinstance(result, dict)


def test_optional_scalar() -> None:
    """A scalar that is left out gets its default."""

    def forward(x: Any, n: int = 7) -> Any:
        return x, n

    grouping = grouping_of(forward, X, optional(build.spec("n", "INT64", (1,))))
    item: Item = {"x": torch.ones(1, 4)}

    result = received(grouping, forward, item, {**item, "n": torch.full((1, 1), 2)}, item)

    assert [number for _, number in result] == [7, 2]


# --- strings ---------------------------------------------------------------------------------


def words(x: list[str]) -> Any:
    return x


def blobs(x: list[bytes]) -> Any:
    return x


def rows_of_words(x: list[list[str]]) -> Any:
    return x


def rows_of_blobs(x: list[list[bytes]]) -> Any:
    return x


SENT = texts([b"a", b"\xc3\xa4"], [b"", b"b"])


@pytest.mark.parametrize(
    ("forward", "value"),
    [
        pytest.param(words, ["a", "ä", "", "b"], id="list[str]"),
        pytest.param(blobs, [b"a", b"\xc3\xa4", b"", b"b"], id="list[bytes]"),
        pytest.param(rows_of_words, [["a", "ä"], ["", "b"]], id="list[list[str]]"),
        pytest.param(rows_of_blobs, [[b"a", b"\xc3\xa4"], [b"", b"b"]], id="list[list[bytes]]"),
    ],
)
def test_strings_are_lists(forward: Callable[..., Any], value: Any) -> None:
    """An annotated list of strings is flat, as LibTorch's, or nested; str or bytes."""
    grouping = grouping_of(forward, build.spec("x", "BYTES", (2,)))

    assert received(grouping, forward, {"x": SENT}) == [value]


def test_strings_without_an_annotation_are_an_array() -> None:
    """Without an annotation strings stay an array, decoded."""
    (result,) = received(
        grouping_of(identity, build.spec("x", "BYTES", (2,))), identity, {"x": SENT}
    )

    assert isinstance(result, np.ndarray)
    assert result.tolist() == [["a", "ä"], ["", "b"]]


@pytest.mark.parametrize("forward", [blobs, rows_of_blobs])
def test_bytes_may_be_invalid_utf8(forward: Callable[..., Any]) -> None:
    """If forward() takes bytes, any bytes are accepted."""
    grouping = grouping_of(forward, build.spec("x", "BYTES", (1,)))

    assert isinstance(grouping.admit({"x": texts([b"\xff"])}), dict)


class Scripted(nn.Module):
    def forward(self, x: list[str], unit: str) -> list[str]:
        return [text + unit for text in x]


def test_bytes_for_torchscript_may_be_invalid_utf8() -> None:
    """TorchScript strings are bytes: invalid UTF-8 is passed unchanged."""
    compiled: Any = torch.jit.script(Scripted())
    signature = introspection.from_schema(compiled.forward.schema)
    specs = (build.spec("x", "BYTES", (1,)), build.spec("unit", "BYTES", (1,)))
    grouping = Grouping(build.config(inputs=specs), signature)

    item = grouping.admit({"x": texts([b"\xff"], [b"a"]), "unit": texts([b"\xe9"], [b"\xe9"])})

    assert isinstance(item, dict)
    (group,) = grouping.group([(0, item)])
    columns = [item[name] for name in group.inputs.names]
    assert grouping.convert(group.inputs, columns) == [[b"\xff", "a"], b"\xe9"]


# --- CAST_INPUTS -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "cast", "expected"),
    [
        pytest.param("FP32", "BF16", torch.bfloat16, id="BF16"),
        pytest.param("FP64", "FP32", torch.float32, id="FP32"),
        pytest.param("FP32", "FP32", torch.float32, id="already"),
        pytest.param("INT64", "FP16", torch.int64, id="integers stay"),
        pytest.param("BOOL", "FP16", torch.bool, id="bools stay"),
        pytest.param("FP64", None, torch.float64, id="not asked for"),
    ],
)
def test_inputs_are_cast_on_demand(sent: str, cast: str | None, expected: torch.dtype) -> None:
    """With CAST_INPUTS floating-point inputs get that type; others do not change."""
    spec = build.spec("x", sent)
    column = torch.ones(1, 4, dtype=getattr(torch, str(spec.dtype.torch)))

    (x,) = received(grouping_of(identity, spec, cast_inputs=cast), identity, {"x": column})

    assert x.dtype is expected
    assert x.tolist() == column.tolist()


# --- places ----------------------------------------------------------------------------------


# --- the fast path -----------------------------------------------------------------------------


def shortcut(settings: ModelConfig, *items: Item) -> bool:
    """Return whether the items share a call without a check of each shape."""
    signature = introspection.from_function(lambda x, n=None: x)
    group = Grouping(settings, signature).single_group(items)
    assert group is None or list(group.positions) == list(range(len(items)))
    return group is not None


TWO = (build.spec("x"), build.spec("n"))


@pytest.mark.parametrize(
    ("settings", "short"),
    [
        pytest.param(build.config(inputs=TWO), True, id="fixed dims"),
        pytest.param(build.config(inputs=TWO, max_batch_size=0), False, id="no batches"),
        pytest.param(
            build.config(inputs=(build.spec("x", dims=(-1,)), TWO[1])), False, id="variable dims"
        ),
        pytest.param(
            build.config(inputs=TWO, force_cpu_only_input_tensors=False), True, id="any device"
        ),
    ],
)
def test_uniform_items(settings: ModelConfig, short: bool) -> None:
    """Shapes that Triton has compared are not compared again."""
    items: list[Item] = [{"x": torch.zeros(rows, 4), "n": torch.zeros(rows, 4)} for rows in (1, 2)]

    assert shortcut(settings, *items) is short


@pytest.mark.parametrize(("devices", "short"), [(["meta", "meta"], True), (["cpu", "meta"], False)])
def test_items_that_triton_leaves_on_the_gpu(devices: list[str], short: bool) -> None:
    """Items on one device share a call on the fast path; items on two devices never share one."""
    settings = build.config(inputs=TWO, force_cpu_only_input_tensors=False)
    items: list[Item] = [
        {"x": torch.zeros(1, 4, device=device), "n": np.zeros((1, 4), np.float32)}
        for device in devices
    ]
    grouping = Grouping(settings, introspection.from_function(lambda x, n=None: x))

    assert (grouping.single_group(items) is not None) is short
    groups = grouping.group(list(enumerate(items)))
    assert len(groups) == len(set(devices))


@pytest.mark.parametrize(
    "item",
    [
        pytest.param({"x": torch.zeros(2, 4)}, id="an input is missing"),
        pytest.param({"x": torch.zeros(2, 4), "n": torch.zeros(3, 4)}, id="rows differ"),
    ],
)
def test_items_that_need_the_slow_path(item: Item) -> None:
    """One item with a missing dimension or input sends all items to the slow path."""
    sound: Item = {"x": torch.zeros(2, 4), "n": torch.zeros(2, 4)}
    optional = dataclasses.replace(TWO[1], optional=True)

    assert not shortcut(build.config(inputs=(TWO[0], optional)), sound, item)


@pytest.mark.parametrize(
    ("n", "short"),
    [
        pytest.param(torch.zeros(1, 3), True, id="alike"),
        pytest.param(torch.zeros(1, 4), False, id="another shape"),
        pytest.param(torch.zeros(1, 3, dtype=torch.float16), False, id="another type"),
        pytest.param(None, False, id="a first step"),
    ],
)
def test_states_are_compared(n: Tensor | None, short: bool) -> None:
    """The config has no shapes for STATE: steps share a call if shapes and types are equal."""
    sequencing = SequenceConfig(1, 1.0, 0.0, (), (State("n", "m"),))
    items: list[Item] = [{"x": torch.zeros(1, 4), "n": torch.zeros(1, 3)}, {"x": torch.zeros(1, 4)}]
    if n is not None:
        items[1]["n"] = n

    assert shortcut(build.config(inputs=TWO[:1], sequencing=sequencing), *items) is short
