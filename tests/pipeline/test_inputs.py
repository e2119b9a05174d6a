from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import build
import numpy as np
import pytest
import torch
from engines import engine, texts

from torch_py_backend.config.model_config import Origin
from torch_py_backend.errors import InputError
from torch_py_backend.pipeline.inputs import Inputs
from torch_py_backend.pipeline.padding import Padding
from torch_py_backend.signature import introspection
from torch_py_backend.values import Item


def inputs_of(forward: Callable[..., Any], **overrides: Any) -> Inputs:
    config = build.config(**overrides)
    padding = Padding(config) if config.options.pad else None
    return Inputs(config, introspection.from_function(forward), padding)


def identity(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("shape", "dims"), [((4,), (4,)), ((), (-1,)), ((1, 4, 1), (-1,))], ids=str
)
def test_an_item_without_rows_is_refused(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    # Triton drops the first dimension of a request with 0 rows.
    item: Item = {"x": np.ones(shape, dtype=np.float32)}
    stage = inputs_of(identity, inputs=(build.spec("x", dims=dims),)).stage(lambda _: identity)
    (_, refused), (group,) = stage([{"x": torch.ones(2, 4)}, item])
    assert isinstance(refused, InputError)
    assert f"input 'x' has the shape {list(shape)} and no rows" in str(refused)
    assert group.places == [0]


def of_number(x: Any, n: float) -> Any:
    return x


def of_texts(x: list[str]) -> Any:
    return x


def of_pair(x: Any, n: Any = None) -> Any:
    return x


_BYTES = [[b"a", b"\xff"], [b"", b"b"]]


@pytest.mark.parametrize(
    ("kind", "sent", "expected"),
    [
        (list[bytes], _BYTES, [b"a", b"\xff", b"", b"b"]),
        (list[list[bytes]], _BYTES, _BYTES),
        (list[list[str]], [[b"a", b"b"], [b"", b"c"]], [["a", "b"], ["", "c"]]),
    ],
)
def test_strings_are_one_list_or_keep_their_shape_in_nested_ones(
    kind: Any, sent: list[list[bytes]], expected: list[Any]
) -> None:
    def forward(x: Any) -> Any:
        assert x == expected
        return x

    forward.__annotations__["x"] = kind
    x, y = build.spec("x", "BYTES", (2,)), build.spec("y", "BYTES", (2,))
    (outcome,) = engine(forward, inputs=(x,), outputs=(y,)).run([{"x": texts(*sent)}])
    assert outcome["y"].tolist() == texts(*expected).reshape(2, 2).tolist()


FIXED = {"inputs": (build.spec("x"), build.spec("n"))}
ANYWHERE = {**FIXED, "force_cpu_only_input_tensors": False}
VARIABLE = {"inputs": (build.spec("n"), build.spec("x", dims=(-1,)))}
OPTIONAL = {"inputs": (build.spec("x"), dataclasses.replace(build.spec("n"), optional=True))}
TEXTS = {"inputs": (build.spec("x", "BYTES", (1,)),), "forward": of_texts}
NUMBER = {"inputs": (build.spec("x"), build.spec("n", dims=(1,))), "forward": of_number}
STATES = {"inputs": (dataclasses.replace(build.spec("x"), origin=Origin.STATE),)}
PADDED = {
    "inputs": tuple(
        dataclasses.replace(build.spec(name, "INT64", (-1,)), ragged=True) for name in ("x", "n")
    ),
    "pad": {"x": {"mask": "n"}},
}


def pair_of(rows: int = 1, n: tuple[int, ...] = (1, 4), **how: Any) -> Item:
    return {"x": torch.zeros(rows, 4, **how), "n": torch.zeros(n)}


def number(value: float) -> Item:
    return {"x": torch.ones(2, 4), "n": torch.full((2, 1), value)}


def text(value: bytes) -> Item:
    return {"x": texts([value])}


def ids(x: tuple[int, int], n: tuple[int, int]) -> Item:
    return {"x": np.ones(x, dtype=np.int64), "n": np.ones(n, dtype=np.int64)}


@pytest.mark.parametrize(
    ("overrides", "first", "second", "shares"),
    [
        pytest.param(FIXED, pair_of(), pair_of(2, (2, 4)), True, id="fixed dims"),
        pytest.param(FIXED | {"max_batch_size": 0}, pair_of(), pair_of(), False, id="no batches"),
        pytest.param(
            VARIABLE, pair_of(), pair_of() | {"x": torch.zeros(1, 3)}, False, id="variable dims"
        ),
        pytest.param(OPTIONAL, pair_of(), {"x": torch.zeros(2, 4)}, False, id="a missing input"),
        pytest.param(ANYWHERE, pair_of(), pair_of(), True, id="one device"),
        pytest.param(ANYWHERE, pair_of(), pair_of(device="meta"), False, id="two devices"),
        pytest.param(TEXTS, text(b"a"), text("ä".encode()), True, id="text"),
        pytest.param(TEXTS, text(b"\xc3"), text(b"\xa4"), False, id="half characters"),
        pytest.param(TEXTS, text(b"a"), text(b"\xff"), False, id="bytes"),
        pytest.param(NUMBER, number(2.0), number(2.0), True, id="one number"),
        pytest.param(NUMBER, number(2.0), number(3.0), False, id="two numbers"),
        pytest.param(NUMBER, number(float("nan")), number(float("nan")), True, id="NaN"),
        pytest.param(
            STATES, {"x": torch.ones(1, 4)}, {"x": torch.ones(2, 4)}, True, id="nothing but states"
        ),
        pytest.param(PADDED, ids((1, 8), (1, 8)), ids((4, 1), (4, 1)), True, id="padded"),
        pytest.param(PADDED, ids((1, 40), (1, 40)), ids((8, 1), (8, 1)), False, id="too long"),
        pytest.param(PADDED, ids((1, 3), (1, 3)), ids((1, 2), (1, 3)), False, id="another mask"),
    ],
)
def test_valid_items_that_are_alike_share_a_call(
    overrides: dict[str, Any], first: Item, second: Item, shares: bool
) -> None:
    inputs = inputs_of(**{"forward": of_pair, **overrides})
    entries, groups = inputs.stage(lambda _: identity)([first, second])
    refused = [entry for entry in entries if isinstance(entry, InputError)]
    assert shares == (len(groups) == 1 and not refused)
    if shares:
        _, sizes = groups[0].gather(groups[0].items)
        assert sizes == [len(first["x"]), len(second["x"])]
