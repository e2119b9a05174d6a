"""Check, decode, group and convert items."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import build
import numpy as np
import pytest
import torch
from engines import texts

from torch_py_backend.config.model_config import TensorSpec
from torch_py_backend.errors import BackendError, BindingError, InputError
from torch_py_backend.pipeline.inputs import Inputs
from torch_py_backend.pipeline.padding import Padding
from torch_py_backend.signature import introspection
from torch_py_backend.values import Item


def optional(spec: TensorSpec) -> TensorSpec:
    return dataclasses.replace(spec, optional=True)


def inputs_of(forward: Callable[..., Any], *specs: TensorSpec, **overrides: Any) -> Inputs:
    config = build.config(inputs=specs, **overrides)
    return Inputs(config, introspection.from_function(forward))


def received(inputs: Inputs, forward: Callable[..., Any], *items: Item) -> list[Any]:
    """Return the arguments of each call of forward() for these items."""
    group = inputs.stage(lambda binding: lambda *columns: binding.call(forward, columns))
    entries, groups = group(items)
    assert not any(isinstance(entry, BackendError) for entry in entries)
    return [group.call(*group.gather(group.items)[0]) for group in groups]


def positions(inputs: Inputs, *items: Item) -> list[list[int]]:
    """Return the positions of the items of each call."""
    _, groups = inputs.stage(lambda _: identity)(items)
    return [list(group.places) for group in groups]


def identity(x: Any) -> Any:
    return x


def two(x: Any, y: Any = None) -> Any:
    return x, y


X = build.spec("x")


@pytest.mark.parametrize(
    ("shape", "dims"), [((4,), (4,)), ((), (-1,)), ((1, 4, 1), (-1,))], ids=str
)
def test_an_item_without_rows_is_refused(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    # Triton drops the first dimension of a request with 0 rows.
    inputs = inputs_of(identity, build.spec("x", dims=dims))
    item: Item = {"x": np.ones(shape, dtype=np.float32)}
    refused = inputs.refusal([item])
    assert isinstance(refused, InputError)
    assert f"input 'x' has the shape {list(shape)} and no rows" in str(refused)
    entries, (group,) = inputs.stage(lambda _: identity)([{"x": torch.ones(2, 4)}, item])
    assert (type(entries[1]), group.places) == (InputError, [0])


def test_any_input_separates_items() -> None:
    x, y = build.spec("x", dims=(-1,)), optional(build.spec("y", dims=(-1,)))
    inputs = inputs_of(two, x, y, force_cpu_only_input_tensors=False)
    first: Item = {"x": torch.ones(1, 2), "y": torch.ones(1, 2)}
    second: Item = {**first, "y": torch.ones(1, 3)}
    third: Item = {**first, "x": torch.ones(1, 2, device="meta")}
    calls = positions(inputs, first, second, third, {"x": first["x"]}, first)
    assert calls == [[0, 4], [1], [2], [3]]


def takes(annotation: type) -> Callable[..., Any]:
    def forward(x: Any, n: Any) -> Any:
        return x, n

    forward.__annotations__["n"] = annotation
    return forward


@pytest.mark.parametrize(("annotation", "dtype"), [(int, "FP32"), (float, "BYTES"), (str, "FP32")])
def test_scalar_of_another_type_is_refused_at_load(annotation: type, dtype: str) -> None:
    with pytest.raises(BindingError):
        inputs_of(takes(annotation), X, build.spec("n", dtype, (1,)))


def test_strings_keep_their_shape_in_nested_lists() -> None:
    def forward(x: list[list[bytes]]) -> Any:
        return x

    inputs = inputs_of(forward, build.spec("x", "BYTES", (2,)))
    sent = texts([b"a", b"\xff"], [b"", b"b"])
    assert received(inputs, forward, {"x": sent}) == [[[b"a", b"\xff"], [b"", b"b"]]]


FIXED = {"inputs": (build.spec("x"), build.spec("n"))}
ANYWHERE = {**FIXED, "force_cpu_only_input_tensors": False}
VARIABLE = {"inputs": (build.spec("x", dims=(-1,)), build.spec("n"))}
OPTIONAL = {"inputs": (build.spec("x"), optional(build.spec("n")))}
TEXTS = {"inputs": (build.spec("x", "BYTES", (1,)),)}
PADDED = {
    "inputs": tuple(
        dataclasses.replace(build.spec(name, "INT64", (-1,)), ragged=True) for name in ("x", "n")
    ),
    "pad": {"x": {"mask": "n"}},
}


def pair_of(rows: int = 1, n: tuple[int, ...] = (1, 4), **how: Any) -> Item:
    return {"x": torch.zeros(rows, 4, **how), "n": torch.zeros(n)}


def ids(rows: int, length: int, mask: int | None = None) -> Item:
    return {
        "x": np.ones((rows, length), dtype=np.int64),
        "n": np.ones((rows, length if mask is None else mask), dtype=np.int64),
    }


@pytest.mark.parametrize(
    ("overrides", "items", "shares"),
    [
        pytest.param(FIXED, [pair_of(), pair_of(2, (2, 4))], True, id="fixed dims"),
        pytest.param(FIXED | {"max_batch_size": 0}, [pair_of()], True, id="no batches"),
        pytest.param(
            VARIABLE, [pair_of(), pair_of() | {"x": torch.zeros(1, 3)}], False, id="variable dims"
        ),
        pytest.param(
            OPTIONAL, [pair_of(), {"x": torch.zeros(2, 4)}], False, id="an input is missing"
        ),
        pytest.param(ANYWHERE, [pair_of(), pair_of()], True, id="one device"),
        pytest.param(ANYWHERE, [pair_of(), pair_of(device="meta")], False, id="two devices"),
        pytest.param(TEXTS, [{"x": texts([b"a"])}, {"x": texts(["ä".encode()])}], True, id="text"),
        pytest.param(
            TEXTS, [{"x": texts([b"\xc3"])}, {"x": texts([b"\xa4"])}], False, id="half characters"
        ),
        pytest.param(TEXTS, [{"x": texts([b"a"])}, {"x": texts([b"\xff"])}], False, id="bytes"),
        pytest.param(PADDED, [ids(1, 8), ids(4, 1)], True, id="padded"),
        pytest.param(PADDED, [ids(1, 40), ids(8, 1)], False, id="too much padding"),
        pytest.param(PADDED, [ids(1, 3), ids(1, 2, mask=3)], False, id="mask of another length"),
    ],
)
def test_valid_items_that_are_alike_share_a_call(
    overrides: dict[str, Any], items: list[Item], shares: bool
) -> None:
    def forward(x: list[str], n: Any = None) -> Any:
        return x, n

    config = build.config(**overrides)
    padding = Padding(config) if config.options.pad else None
    function = forward if overrides is TEXTS else lambda x, n=None: x
    inputs = Inputs(config, introspection.from_function(function), padding)
    entries, groups = inputs.stage(lambda _: identity)(items)
    refused = [entry for entry in entries if isinstance(entry, InputError)]
    assert shares == (len(groups) == 1 and not refused)


def test_items_with_one_scalar_share_a_call() -> None:
    inputs = inputs_of(takes(float), X, build.spec("n", "FP32", (1,)))
    sent: list[Item] = [
        {"x": torch.ones(2, 4), "n": torch.full((2, 1), value)}
        for value in (2.0, 2.0, float("nan"), float("nan"))
    ]
    assert positions(inputs, *sent) == [[0, 1], [2, 3]]
