"""Gather items into a batch, scatter its outputs, and the rows of its calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import build
import numpy as np
import pytest
import torch
from engines import texts
from torch import Tensor

from torch_py_backend.config.model_config import Origin
from torch_py_backend.errors import ConfigError
from torch_py_backend.pipeline import batches
from torch_py_backend.pipeline.inputs import Inputs
from torch_py_backend.signature import introspection
from torch_py_backend.values import ANY_ROWS, Item, Rows, Value


def item(rows: int, start: float = 0.0) -> dict[str, Any]:
    x = torch.arange(rows * 2.0).reshape(rows, 2) + start
    return {"x": x, "n": torch.full((rows, 1), start, dtype=torch.int64)}


def gathered(items: Sequence[Item]) -> tuple[Sequence[Value], Sequence[int]]:
    """Return the columns of n and x, and the rows of each item; x is a state."""
    state = dataclasses.replace(build.spec("x", dims=(2,)), origin=Origin.STATE)
    config = build.config(inputs=(state, build.spec("n", "INT64", (1,))))
    inputs = Inputs(config, introspection.from_function(lambda n, x: (n, x)))
    _, (group,) = inputs.stage(lambda _: lambda *columns: columns)(items)
    return group.gather(group.items)


@pytest.mark.parametrize(
    ("sizes", "arrays"),
    [([1, 1], True), ([3, 1, 2], False), ([2, 0, 1], True), ([0, 0], False)],
    ids=str,
)
def test_gather_and_scatter(sizes: list[int], arrays: bool) -> None:
    """Each item gets back its own rows; columns are tensors in the requested order."""
    items: list[Item] = [item(rows, start=100.0 * position) for position, rows in enumerate(sizes)]
    if arrays:
        items = [{name: np.asarray(value) for name, value in item.items()} for item in items]
    columns, counts = gathered(items)
    outcomes = batches.scatter(columns, ["n", "x"], counts)
    assert list(counts) == sizes
    assert all(isinstance(column, Tensor) for column in columns)
    assert [column.shape for column in columns] == [(sum(sizes), 1), (sum(sizes), 2)]
    assert [column.dtype for column in columns] == [torch.int64, torch.float32]
    for outcome, sent in zip(outcomes, items, strict=True):
        for name in ("x", "n"):
            assert np.array_equal(outcome[name], sent[name])


@pytest.mark.parametrize("rows", [0, 2])
def test_single_item_is_copied_only_on_demand(rows: int) -> None:
    """A single item passes as the request's own tensors, but for states: a model may write."""
    sent = item(rows)
    (n, x), counts = gathered([sent])
    x[:] = 9
    assert list(counts) == [rows]
    assert n is sent["n"]
    assert (sent["x"] != 9).all()


@pytest.mark.parametrize(
    ("total", "rows", "calls"),
    [
        pytest.param(4, Rows(4, 4), [([0, 1, 2, 3], 4)], id="full"),
        pytest.param(
            5, Rows(4, 4), [([0, 1, 2, 3], 4), ([4, 4, 4, 4], 1)], id="the last filled up"
        ),
        pytest.param(3, Rows(1, 1), [([0], 1), ([1], 1), ([2], 1)], id="one by one"),
        pytest.param(1, Rows(2, None), [([0, 0], 1)], id="at least two"),
        pytest.param(7, Rows(2, 4, (2, 4)), [([0, 1, 2, 3], 4), ([4, 5, 6, 6], 3)], id="buckets"),
        pytest.param(5, Rows(2, 4, (2, 4)), [([0, 1, 2, 3], 4), ([4, 4], 1)], id="two buckets"),
        pytest.param(0, Rows(4, 4), [([], 0)], id="no rows"),
    ],
)
def test_columns_are_fitted_to_the_rows_of_a_program(
    total: int, rows: Rows, calls: list[tuple[list[int], int]]
) -> None:
    """Each call has rows that the program takes; missing ones repeat the last, none stay none."""
    columns: list[Value] = [torch.arange(total), texts(*map(str, range(total)))]
    parts = list(batches.fit(columns, rows))
    assert [(column.tolist(), present) for (column, _), present in parts] == calls
    assert [(strings.tolist(), present) for (_, strings), present in parts] == [
        ([str(row) for row in rows], present) for rows, present in calls
    ]


def test_items_with_nothing_but_states() -> None:
    """Their rows are counted, too: each sequence keeps its own."""
    state = dataclasses.replace(build.spec("x", dims=(2,)), origin=Origin.STATE)
    inputs = Inputs(build.config(inputs=(state,)), introspection.from_function(lambda x: x))
    _, (group,) = inputs.stage(lambda _: lambda x: x)([{"x": torch.ones(1, 2)}] * 2)
    (x,), sizes = group.gather(group.items)
    assert (x.shape, sizes) == ((2, 2), [1, 1])


@pytest.mark.parametrize(
    ("most", "takes", "fixed", "wished", "expected"),
    [
        pytest.param(0, ANY_ROWS, True, None, ANY_ROWS, id="no batches"),
        pytest.param(8, ANY_ROWS, False, None, Rows(1, 8), id="at most max_batch_size"),
        pytest.param(8, ANY_ROWS, True, None, Rows(1, 8, (1, 2, 4, 8)), id="fixed shapes"),
        pytest.param(6, ANY_ROWS, True, None, Rows(1, 6, (1, 2, 4, 6)), id="no power of two"),
        pytest.param(8, ANY_ROWS, False, (2, 8), Rows(2, 8, (2, 8)), id="a list"),
        pytest.param(8, Rows(4, 4), False, None, Rows(4, 4), id="a program's fixed batch"),
        pytest.param(2, Rows(4, 4), True, None, Rows(4, 4, (4,)), id="above max_batch_size"),
        pytest.param(8, Rows(2, None), False, None, Rows(2, 8), id="at least two"),
        pytest.param(8, Rows(2, 6), False, (1, 4, 8), Rows(4, 4, (4,)), id="only what it takes"),
    ],
)
def test_rows_of_a_call(
    most: int, takes: Rows, fixed: bool, wished: tuple[int, ...] | None, expected: Rows
) -> None:
    """The model's limits, max_batch_size and the buckets are combined."""
    config = build.config(max_batch_size=most, batch_buckets=wished)
    assert batches.row_counts(config, takes, fixed=fixed) == expected


def test_unusable_buckets() -> None:
    """Buckets that the model does not accept are refused with its limits."""
    config = build.config(max_batch_size=8, batch_buckets=(1, 2))
    with pytest.raises(ConfigError, match=r"BATCH_BUCKETS is 1, 2; expected .* 4 to 8"):
        batches.row_counts(config, Rows(4, 8), fixed=False)
