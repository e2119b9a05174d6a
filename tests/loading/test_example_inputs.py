from __future__ import annotations

from typing import Any

import build
import numpy as np
import pytest
import torch

from torch_py_backend.config import dtypes
from torch_py_backend.loading import example_inputs
from torch_py_backend.values import Item

FLOATS = ("FP16", "FP32", "FP64", "BF16")


def shapes(item: Item) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in item.items()}


@pytest.mark.parametrize(
    ("rows", "shrunk", "multiple", "expected"),
    [
        (None, True, 1, {"x": (3, 6), "n": ()}),
        (5, True, 1, {"x": (5, 3, 6), "n": (5,)}),
        (0, False, 1, {"x": (0, 3, 8), "n": (0,)}),
        # PAD rounds up.
        (1, False, 16, {"x": (1, 3, 32), "n": (1,)}),
        (1, True, 16, {"x": (1, 3, 16), "n": (1,)}),
    ],
)
def test_item_has_the_configs_shapes_and_two_sizes_differ(
    rows: int | None, shrunk: bool, multiple: int, expected: dict[str, tuple[int, ...]]
) -> None:
    inputs = (build.spec("x", dims=(3, -1)), build.spec("n", "INT64", ()))
    config = build.config(inputs=inputs, pad={"x": {"multiple_of": multiple}})
    assert shapes(example_inputs.item(config, rows, shrunk=shrunk)) == expected


def test_made_up_values_are_floats_from_0_to_1_integers_of_1_and_strings() -> None:
    for dtype in dtypes.TABLE:
        spec = build.spec("x", dtype.triton, (100,))
        value: Any = example_inputs.item(build.config(inputs=(spec,)), 3)["x"]
        assert value.shape == (3, 100)
        if dtype.torch is None:
            assert set(value.flat) == {b"text"}
            continue
        assert value.dtype is getattr(torch, dtype.torch)
        values = value.to(torch.float64)
        assert 0 <= values.min() <= values.max() <= 1
        assert (len(set(values.flatten().tolist())) > 10) is (dtype.triton in FLOATS)


@pytest.mark.parametrize(
    ("rows", "shrunk", "expected"),
    [
        (3, False, [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]]),
        (1, True, [[1, 2]]),
        (0, False, []),
    ],
)
def test_examples_are_repeated_and_shortened(rows: int, shrunk: bool, expected: Any) -> None:
    config = build.config(inputs=(build.spec("x", "INT64", (-1,)), build.spec("n")))
    example = torch.arange(1, 9).reshape(2, 4)
    for value in (example, example.numpy().astype(np.object_)):  # strings are arrays of objects
        item = example_inputs.item(config, rows, shrunk=shrunk, example={"x": value})
        assert item["x"].tolist() == expected
        assert item["n"].shape == (rows, 4)
    assert "n" not in example_inputs.item(config, rows, without=["n"])


@pytest.mark.parametrize(
    ("dims", "value", "fits"),
    [
        ((-1,), torch.zeros(2, 4), True),
        ((), torch.zeros(2), True),
        ((4,), torch.zeros(4), False),
        ((4,), torch.zeros(2, 5), False),
        ((4,), torch.zeros(0, 4), False),
        ((4,), torch.zeros(2, 4, dtype=torch.int64), False),
        ((4,), np.full((2, 4), "text", dtype=np.object_), False),
    ],
)
def test_an_example_fits_if_dtype_and_shape_do(dims: Any, value: Any, fits: bool) -> None:
    assert example_inputs.fits(build.config(), build.spec("x", dims=dims), value) is fits


def test_rows_of_one_value_are_equal_as_an_argument_may_be_a_float() -> None:
    config = build.config(inputs=(build.spec("x", dims=()), build.spec("y", dims=(1, 1))))
    item = example_inputs.item(config, 4)
    assert shapes(item) == {"x": (4,), "y": (4, 1, 1)}
    for value in item.values():
        assert len(set(torch.as_tensor(value).flatten().tolist())) == 1
