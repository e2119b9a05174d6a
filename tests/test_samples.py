"""Made-up requests for a config."""

from __future__ import annotations

import dataclasses

import build
import numpy as np
import pytest
import torch
from torch import Tensor

from torch_py_backend import dtypes, samples
from torch_py_backend.batching import Item

TENSOR_TYPES = [one.triton for one in dtypes.TABLE if one.torch is not None]
FLOATS = ("FP16", "FP32", "FP64", "BF16")


def shapes(item: Item) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in item.items()}


@pytest.mark.parametrize(
    ("rows", "variable", "found"),
    [
        pytest.param(None, 1, {"x": (3, 1), "n": ()}, id="no batches"),
        pytest.param(None, 6, {"x": (3, 6), "n": ()}, id="no batches, six"),
        pytest.param(1, 1, {"x": (1, 3, 1), "n": (1,)}, id="one row"),
        pytest.param(5, 8, {"x": (5, 3, 8), "n": (5,)}, id="five rows, eight"),
        pytest.param(0, 1, {"x": (0, 3, 1), "n": (0,)}, id="no row"),
    ],
)
def test_item_has_the_configs_shapes(
    rows: int | None, variable: int, found: dict[str, tuple[int, ...]]
) -> None:
    """All inputs agree in rows, and only a dimension of -1 is stretched."""
    config = build.config(inputs=(build.spec("x", dims=(3, -1)), build.spec("n", "INT64", ())))

    assert shapes(samples.item(config, rows, variable)) == found


@pytest.mark.parametrize("name", TENSOR_TYPES)
def test_item_has_the_configs_type(name: str) -> None:
    """A sample of every type can be made: floats between 0 and 1, whole numbers of 1."""
    spec = build.spec("x", name, (100,))

    value = samples.item(build.config(inputs=(spec,)), None)["x"]

    assert isinstance(value, Tensor)
    assert value.dtype is getattr(torch, str(spec.dtype.torch))
    values = value.to(torch.float64)
    assert 0 <= values.min() <= values.max() <= 1
    assert (len(set(values.tolist())) > 10) is (name in FLOATS)


def test_strings_come_as_requests_bring_them() -> None:
    """A sample of strings is an array of bytes, as Triton hands it over."""
    value = samples.item(build.config(inputs=(build.spec("x", "BYTES", (-1, 2)),)), 3, 4)["x"]

    assert isinstance(value, np.ndarray)
    assert value.dtype == np.object_
    assert value.shape == (3, 4, 2)
    assert set(value.flat) == {b"text"}


@pytest.mark.parametrize(("optional", "names"), [(True, ["x", "n"]), (False, ["x"])])
def test_optional_inputs_may_be_left_out(optional: bool, names: list[str]) -> None:
    """A sample has all inputs, or those that every request must have."""
    left_out = dataclasses.replace(build.spec("n"), optional=True)
    config = build.config(inputs=(build.spec("x"), left_out))

    assert list(samples.item(config, 1, optional=optional)) == names


def test_items_are_the_same_each_time() -> None:
    """What fails with a sample, fails again: its numbers are not drawn anew."""
    first, second = (samples.item(build.config(), 2)["x"] for _ in range(2))

    assert first.tolist() == second.tolist()


def test_inputs_of_an_item_differ() -> None:
    """Two inputs that a model mixes up do not go unnoticed for being equal."""
    config = build.config(inputs=(build.spec("x"), build.spec("y")))

    item = samples.item(config, 2)

    assert item["x"].tolist() != item["y"].tolist()


def test_global_random_numbers_are_left_alone() -> None:
    """A model that draws random numbers draws the same ones with and without warm-up."""
    before = torch.random.get_rng_state()

    samples.item(build.config(), 8)

    assert torch.equal(torch.random.get_rng_state(), before)
