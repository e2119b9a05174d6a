from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import build
import fake_gpu
import numpy as np
import pytest
import torch
from engines import engine
from models import double
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend import composition
from torch_py_backend.errors import (
    BackendError,
    BindingError,
    ForwardError,
    InputError,
    OutputError,
)
from torch_py_backend.pipeline.hooks import split, to_device
from torch_py_backend.values import RequestItem

_X = build.spec("x", dims=(-1,))


def item(*rows: Any, **parameters: Any) -> RequestItem:
    return RequestItem({"x": torch.tensor(rows, dtype=torch.float32)}, parameters=parameters)


_ONE, _TWO = item([1.0]), item([1.0], [2.0])


def values(outcomes: Any) -> list[Any]:
    """Return each outcome's output as lists, or its error."""
    return [one if isinstance(one, BackendError) else one["y"].tolist() for one in outcomes]


@pytest.mark.parametrize(
    ("returned", "module", "batched"),
    [
        (lambda x: x.numpy(), lambda a: a, True),
        (lambda x: x.tolist(), lambda a: a, False),
        (lambda x: (2 * x, x), lambda a, b: a - b, True),
        (lambda x: collections.UserDict({"b": x, "a": 2 * x}), lambda a, b: a - b, True),
        (lambda x: {"a": x, "b": 3}, lambda a, b: a + b[:, None] - 3, True),
    ],
    ids=["array", "list", "tuple", "mapping", "number"],
)
def test_preprocess_returns_one_argument_or_several_or_named_ones(
    returned: Callable[[Tensor], Any], module: Callable[..., Any], batched: bool
) -> None:
    hooks = {"preprocess": returned, "postprocess": lambda y: {"y": y.tolist()}}
    model = engine(module, hooks=hooks, max_batch_size=8 if batched else 0)
    sent = item([1.0, 2.0], [3.0, 4.0]) if batched else item(1.0, 2.0)
    assert values(model.run([sent])) == [sent["x"].tolist()]


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    ("annotation", "kind", "sent", "received"),
    [
        (bytes, "BYTES", np.array([b"\xff"], dtype=object), b"\xff"),
        (list[str], "BYTES", np.array([b"a", "é".encode()], dtype=object), ["a", "é"]),
        (int, "INT32", torch.tensor([7], dtype=torch.int32), 7),
    ],
)
def test_a_rows_value_has_the_annotated_type(
    annotation: Any, kind: str, sent: Any, received: Any, batched: bool
) -> None:
    def preprocess(x: Any, scale: float = 2.0) -> dict[str, Any]:
        assert (x, type(x)) == (received, type(received))
        return {"x": torch.ones(1) * scale}

    preprocess.__annotations__["x"] = annotation
    scale = dataclasses.replace(build.spec("scale", dims=(1,)), optional=True)
    model = engine(
        double,
        hooks={"preprocess": preprocess},
        inputs=(build.spec("x", kind, (-1,)), scale),
        max_batch_size=8 if batched else 0,
    )
    plain = {"x": sent[None] if batched else sent}
    scaled = plain | {"scale": torch.tensor([[0.5]])}
    assert [one["y"].reshape(-1).tolist() for one in model.run([plain, scaled])] == [[4], [1]]


@pytest.mark.parametrize("collates", [False, True])
def test_a_hook_that_fills_the_same_dict_for_each_row(collates: bool) -> None:
    own: dict[str, Tensor] = {}

    def fill(x: Tensor) -> dict[str, Tensor]:
        own["x"] = x * 2
        return own

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {"x": torch.stack([row.pop("x") for row in rows])}

    def forward(x: Tensor) -> Tensor:
        assert not (x == 8).any()
        return x

    hooks = {"preprocess": fill, "postprocess": lambda y: {**fill(y), "y": own.pop("x")}}
    model = engine(forward, hooks=hooks | ({"collate": collate} if collates else {}))
    good, bad = model.run([item([1.0], [2.0]), item([4.0])])
    assert values([good]) == [[[4], [8]]]
    assert isinstance(bad, ForwardError)


def test_without_collate_rows_that_cannot_be_stacked_are_different_calls() -> None:
    calls: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        calls.append(x)
        return x.float()

    model = engine(forward, hooks={"preprocess": lambda x: x.double() if x[0] == 0 else 2 * x})
    outcomes = model.run([item([1.0]), item([1.0, 2.0]), item([3.0]), item([0.0])])
    assert values(outcomes) == [[[2]], [[2, 4]], [[6]], [[0]]]
    types = {tuple(call.shape): call.dtype for call in calls}
    assert types == {(2, 1): torch.float32, (1, 2): torch.float32, (1, 1): torch.float64}


def test_collate_makes_one_batch_of_rows_of_any_type() -> None:
    received: list[Any] = []

    def collate(rows: list[Any]) -> Any:
        received.append(rows)
        if isinstance(rows[0], Tensor):
            return rows  # a list is one argument, as detectors take it
        return torch.tensor([[len(row)] for row in rows], dtype=torch.float32)

    hooks: dict[str, Any] = {"preprocess": lambda x: "a" * int(x.sum()), "collate": collate}
    model = engine(double, hooks=hooks)
    assert values(model.run([item([1.0, 1.0], [3.0, 0.0]), item([1.0])])) == [[[4], [6]], [[2]]]
    assert received == [["aa", "aaa", "a"]]
    hooks["preprocess"] = lambda x: x
    model = engine(lambda images: torch.stack([image[:1] for image in images]), hooks=hooks)
    assert values(model.run([item([1.0, 2.0]), item([3.0])])) == [[[1]], [[3]]]
    assert len(received[1]) == 2


@pytest.mark.parametrize(
    ("kind", "returned", "expected"),
    [
        ("INT64", 3, [[3]]),
        ("BF16", 2.5, [[2.5]]),
        ("BOOL", False, [[False]]),
        ("FP64", np.array([1.0]), [[1]]),
        ("INT64", np.arange(3).argmax(), [[2]]),
        ("BOOL", np.True_, [[True]]),
        ("INT64", np.float32(2), [[2]]),
        ("INT64", np.uint64(3), [[3]]),
        ("UINT8", np.int8(-1), "output 'y' is int64 []; expected uint8 [1]"),
        ("BYTES", ["a"], [["a"]]),
        ("BYTES", np.array([b"b"]), [[b"b"]]),
        ("BOOL", 3, "output 'y' is int64 []; expected bool [1]"),
        ("INT64", 2.5, "output 'y' is float32 []; expected int64 [1]"),
        ("UINT8", 300, "an int for output 'y'"),
        ("UINT8", [-1], "output 'y' is int64 [1]; expected uint8 [1]"),
        ("FP32", [[1.0], [1.0, 2.0]], "a list for output 'y'"),
        ("BYTES", [1], "output 'y' is an ndarray; expected a tensor, an array, or"),
    ],
)
def test_the_result_of_postprocess_becomes_the_output_or_is_refused(
    kind: str, returned: Any, expected: Any
) -> None:
    outputs = (build.spec("y", kind, (1,)),)
    for value in (returned, {"y": returned}):
        hooks = {"postprocess": lambda result, value=value: value}
        (outcome,) = engine(double, hooks=hooks, outputs=outputs).run([_ONE])
        if isinstance(expected, list):
            assert values([outcome]) == [expected]
        else:
            assert isinstance(outcome, OutputError)
            assert expected in str(outcome)


def test_hooks_get_the_parameters_of_their_rows() -> None:
    hooks: dict[str, Callable[..., Any]] = {
        "preprocess": lambda x, parameters: x + parameters["n"],
        "collate": lambda rows, parameters: torch.stack(rows) * _n_of(parameters),
        "postprocess": lambda result, parameters: result + parameters["n"],
    }
    # The last row, with its parameters, fills the bucket.
    model = engine(double, hooks=hooks, batch_buckets=(4,))
    sent = [item([1.0], [2.0], n=3), item([3.0], n=5)]
    assert values(model.run(sent)) == [[[27], [33]], [[85]]]
    hooks = {
        "preprocess_batch": lambda x, parameters: x + _n_of(parameters),
        "postprocess_batch": lambda result, parameters: result + _n_of(parameters),
    }
    assert values(engine(double, hooks=hooks).run(sent)) == [[[11], [13]], [[21]]]


def _n_of(rows: Any) -> Tensor:
    return torch.tensor([[row["n"]] for row in rows])


def picky(x: Tensor) -> Tensor:
    """Refuses negative values, and fails at zero."""
    if x.min() < 0:
        raise ValueError("negative")
    if x.min() == 0:
        raise KeyError("zero")
    return x


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("preprocess", InputError),
        ("preprocess_batch", InputError),
        ("collate", ForwardError),
        ("postprocess", ForwardError),
        ("postprocess_batch", ForwardError),
    ],
)
def test_an_exception_of_a_hook_fails_only_its_request(name: str, kind: type) -> None:
    hooks: dict[str, Callable[..., Any]] = {name: picky}
    if name == "collate":
        hooks = {"preprocess": lambda x: x, "collate": lambda rows: picky(torch.stack(rows))}
    sent = [item([1.0]), item([1.0], [-1.0]), item([0.0]), {}, item([2.0])]
    model = engine(double, hooks=hooks)
    outcomes: Any = model.run(sent)
    assert [type(one) for one in outcomes] == [dict, kind, ForwardError, InputError, dict]
    assert [one.reported for one in outcomes[1:4]] == [kind is ForwardError, True, False]
    assert f"{name}() r" in str(outcomes[1])
    assert "Traceback" in outcomes[2].traceback
    if name in ("preprocess", "postprocess"):  # the others are halved
        assert model.counts.retried_rows == 0


def test_a_batch_whose_preprocess_called_another_model_is_halved() -> None:
    model = engine(picky, hooks={"preprocess": lambda x: composition.model("other")(x=x)["y"]})
    with composition.stand_in({"other": lambda x: {"y": x}}):
        outcomes = model.run([item([1.0]), item([0.0]), item([2.0])])
    assert [type(one) for one in outcomes] == [dict, ForwardError, dict]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_outputs_go_to_where_the_request_was(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch)
    model = engine(fake_gpu.put, hooks={"preprocess": double}, force_cpu_only_input_tensors=False)
    x = torch.ones(1, 2)
    outcomes: Any = model.run([{"x": fake_gpu.put(x) if on_gpu else x}])
    assert outcomes[0]["y"].is_cuda == on_gpu
    assert values(outcomes) == [[[2, 2]]]


def _with_optional(x: Tensor, z: Tensor | None = None) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("name", "hook", "sent", "message"),
    [
        ("preprocess", _with_optional, {"x": torch.ones(1)}, "has the shape [1] and no rows"),
        ("preprocess", _with_optional, {"x": torch.ones(0, 1)}, "has no rows"),
        ("preprocess", _with_optional, {"z": torch.ones(1, 1)}, "the request lacks inputs: "),
        ("preprocess", lambda x: torch.empty(10**15) if x > 1 else x, _TWO, "not fit in memory"),
        ("preprocess", lambda x: object() if x > 1 else x, _TWO, "an object, which cannot be"),
        ("preprocess", lambda x: torch.ones(int(x)), _TWO, "other names or shapes for other rows"),
        ("preprocess", lambda x: {"a": x} if x > 1 else {"x": x}, _TWO, "other names or shapes"),
        ("preprocess_batch", lambda x: {"b" if 2 in x else "x": x}, item([2.0]), "has no b"),
        ("postprocess_batch", lambda y: y[:1], _TWO, "has 1 row for a batch of 2"),
        ("postprocess", lambda y: {"z": y} if y > 2 else y, item([2.0]), "returns, a dict"),
        ("postprocess", lambda y: y / (y - 4), item([2.0]), "holds NaN or infinity"),
        ("postprocess", lambda y: torch.ones(int(y)), _TWO, "other shapes for other rows"),
    ],
)
def test_a_request_is_refused_and_the_next_one_is_served(
    name: str, hook: Any, sent: dict[str, Any], message: str
) -> None:
    optional = dataclasses.replace(build.spec("z", dims=(-1,)), optional=True)
    inputs = (_X, optional) if hook is _with_optional else (_X,)
    model = engine(double, hooks={name: hook}, inputs=inputs, check_finite=True)
    refused, served = model.run([sent, _ONE])
    assert message in str(refused)
    assert isinstance(refused, BackendError)
    assert isinstance(served, dict)


def test_rows_that_do_not_fit_in_memory_fail_their_request_only() -> None:
    model = engine(double, hooks={"preprocess": lambda x: x.float()}, cast_inputs="FP64")
    refused, served = model.run([{"x": torch.ones(1, 1).expand(1, 10**15)}, _ONE])
    assert "not fit in memory" in str(refused)
    assert values([served]) == [[[2]]]


def test_preprocess_must_take_the_type_of_its_input() -> None:
    def preprocess(x: int) -> None: ...

    with pytest.raises(BindingError, match=r"'x' is BYTES, and preprocess\(x\) has no"):
        engine(double, hooks={"preprocess": lambda x: x}, inputs=(build.spec("x", "BYTES"),))
    with pytest.raises(BindingError, match=r"no input feeds preprocess\(\)'s argument language"):
        engine(double, hooks={"preprocess": lambda x, language: x})
    with pytest.raises(BindingError, match=r"'x' is FP32, and preprocess\(\) takes an int"):
        engine(double, hooks={"preprocess": preprocess})


class _Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (np.array([1, 2]), [1, 2]),
        ("all", ["all", "all"]),
        (np.array(3), [3, 3]),
        ({"a": ["x", "y"], "b": 0}, [{"a": "x", "b": 0}, {"a": "y", "b": 0}]),
        ((["x", "y"], None), [("x", None), ("y", None)]),
        (_Pair(["x", "y"], 1), [_Pair("x", 1), _Pair("y", 1)]),
        ((), [(), ()]),
        (torch.zeros(3, 2), "a Tensor of length 3"),
        (["a"], "a list of length 1"),
        ({"a": (np.zeros(4),)}, "an ndarray of length 4"),
        ({"a": _X}, "a TensorSpec"),
    ],
)
def test_each_row_gets_its_part_of_a_result(result: Any, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(OutputError, match=f"the result for 2 rows holds {expected}"):
            split(result, 2)
    else:
        parts = split(result, 2)
        assert parts == expected
        assert type(parts[0]) in (type(expected[0]), np.int64, np.ndarray)


def test_tensors_are_moved_in_a_tree_of_the_same_type() -> None:
    for tree in ({"a": [torch.zeros(2)], "b": (1,)}, _Pair(torch.zeros(2), None)):
        moved = to_device(tree, torch.device("meta"), torch.float16)
        assert type(moved) is type(tree)
        (tensor,) = (leaf for leaf in pytree.tree_leaves(moved) if isinstance(leaf, Tensor))
        assert (tensor.device.type, tensor.dtype) == ("meta", torch.float16)
