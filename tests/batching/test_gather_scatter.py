"""Gather items into a batch, and scatter its outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.gather_scatter import Item, Rows, Value


def item(rows: int, start: float = 0.0, width: int = 2) -> dict[str, Any]:
    x = torch.arange(rows * width, dtype=torch.float32).reshape(rows, width) + start
    return {"x": x, "n": torch.full((rows, 1), start, dtype=torch.int64)}


@pytest.mark.parametrize("arrays", [False, True], ids=["tensors", "arrays"])
@pytest.mark.parametrize("sizes", [[1, 1], [3, 1, 2], [2, 0, 1], [0, 0], [0, 5]], ids=str)
def test_gather_and_scatter(sizes: list[int], arrays: bool) -> None:
    """Each item gets back its own rows; columns are tensors."""
    items: list[Item] = [item(rows, start=100.0 * position) for position, rows in enumerate(sizes)]
    if arrays:
        items = [{name: np.asarray(value) for name, value in item.items()} for item in items]

    batch = gather_scatter.gather(items, ["n", "x"])
    outcomes = gather_scatter.scatter(batch.columns, ["n", "x"], batch.sizes)

    assert list(batch.sizes) == sizes
    assert all(isinstance(column, Tensor) for column in batch.columns)
    assert [column.shape for column in batch.columns] == [(sum(sizes), 1), (sum(sizes), 2)]
    assert len(outcomes) == len(items)
    for outcome, sent in zip(outcomes, items, strict=True):
        for name in ("x", "n"):
            assert np.array_equal(outcome[name], sent[name])
            assert str(outcome[name].dtype).endswith(str(sent[name].dtype).rpartition(".")[2])


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_single_item_is_not_copied(rows: int) -> None:
    """A single item passes as the request's own tensors."""
    sent = item(rows)

    batch = gather_scatter.gather([sent], ["x", "n"])
    (outcome,) = gather_scatter.scatter(batch.columns, ["x", "n"], batch.sizes)

    assert list(batch.sizes) == [rows]
    assert outcome["x"] is sent["x"]
    assert outcome["n"] is sent["n"]


def test_columns_are_in_the_requested_order() -> None:
    """The order of a request's inputs does not matter, and other inputs are ignored."""
    items = [{**item(1), "extra": torch.ones(1)}, dict(reversed(item(2).items()))]

    batch = gather_scatter.gather(items, ["n", "x"])

    assert [column.dtype for column in batch.columns] == [torch.int64, torch.float32]


@pytest.mark.parametrize(
    ("dtype", "offsets"), [(torch.float32, [0, 8, 32]), (torch.bfloat16, [0, 4, 16])]
)
def test_scattered_rows_are_contiguous_views(dtype: torch.dtype, offsets: list[int]) -> None:
    """Splitting copies nothing, and every part is contiguous."""
    output = torch.arange(12.0).reshape(6, 2).to(dtype)

    outcomes = gather_scatter.scatter([output], ["y"], [1, 3, 2])

    parts = [torch.as_tensor(outcome["y"]) for outcome in outcomes]
    assert all(part.is_contiguous() for part in parts)
    assert [part.data_ptr() - output.data_ptr() for part in parts] == offsets


# --- strings ---------------------------------------------------------------------------------


def texts(*rows: Any) -> Value:
    return np.array(rows, dtype=np.object_)


# --- rows that a program takes ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "accepted", "refused"),
    [
        (Rows(), (0, 1, 100), ()),
        (Rows(2, None), (0, 2, 3), (1,)),
        (Rows(1, 8), (0, 1, 8), (9,)),
        (Rows(4, 4), (0, 4), (3, 5)),
        (Rows(1, 4, (1, 2, 4)), (0, 1, 2, 4), (3, 5)),
    ],
    ids=str,
)
def test_rows_that_are_one_call(
    rows: Rows, accepted: tuple[int, ...], refused: tuple[int, ...]
) -> None:
    """Only a batch that must be filled up or split is changed; an empty one never is."""
    assert all(map(rows.accept, accepted))
    assert not any(map(rows.accept, refused))


@pytest.mark.parametrize(
    ("total", "rows", "calls"),
    [
        pytest.param(3, Rows(4, 4), [([0, 1, 2, 2], 3)], id="filled up"),
        pytest.param(4, Rows(4, 4), [([0, 1, 2, 3], 4)], id="full"),
        pytest.param(
            5,
            Rows(4, 4),
            [([0, 1, 2, 3], 4), ([4, 4, 4, 4], 1)],
            id="in pieces, the last filled up",
        ),
        pytest.param(3, Rows(1, 1), [([0], 1), ([1], 1), ([2], 1)], id="one by one"),
        pytest.param(1, Rows(2, None), [([0, 0], 1)], id="at least two"),
        pytest.param(3, Rows(2, None), [([0, 1, 2], 3)], id="more than the least"),
        pytest.param(3, Rows(2, 2), [([0, 1], 2), ([2, 2], 1)], id="pairs"),
        pytest.param(3, Rows(1, 2), [([0, 1], 2), ([2], 1)], id="at most two"),
        pytest.param(3, Rows(1, 4, (1, 2, 4)), [([0, 1, 2, 2], 3)], id="to a bucket"),
        pytest.param(7, Rows(2, 4, (2, 4)), [([0, 1, 2, 3], 4), ([4, 5, 6, 6], 3)], id="buckets"),
        pytest.param(5, Rows(2, 4, (2, 4)), [([0, 1, 2, 3], 4), ([4, 4], 1)], id="two buckets"),
    ],
)
def test_columns_are_fitted_to_the_rows_of_a_program(
    total: int, rows: Rows, calls: list[tuple[list[int], int]]
) -> None:
    """Each call has a number of rows that the program takes; missing rows repeat the last one."""
    columns: list[Value] = [torch.arange(total), texts(*map(str, range(total)))]

    parts = list(gather_scatter.fit(columns, rows))

    assert [(column.tolist(), present) for (column, _), present in parts] == calls
    assert [(strings.tolist(), present) for (_, strings), present in parts] == [
        ([str(row) for row in rows], present) for rows, present in calls
    ]


@pytest.mark.parametrize("rows", [Rows(4, 4), Rows(2, None)], ids=str)
def test_no_rows_are_one_call(rows: Rows) -> None:
    """A batch without rows is called once: the program determines the shapes of its outputs."""
    ((columns, present),) = gather_scatter.fit([torch.ones(0, 2)], rows)

    assert columns[0].shape == (0, 2)
    assert present == 0


def test_outputs_of_several_calls_are_joined() -> None:
    """Tensors and strings of the parts are concatenated."""
    pieces: list[list[Value]] = [
        [torch.tensor([1, 2]), texts("a", "b")],
        [torch.tensor([3]), texts("c")],
    ]

    numbers, strings = gather_scatter.join(pieces)

    assert numbers.tolist() == [1, 2, 3]
    assert strings.tolist() == ["a", "b", "c"]


@pytest.mark.parametrize("sizes", [[2], [1, 1], [1, 2, 1], [2, 0]], ids=str)
@pytest.mark.parametrize("strings", [False, True], ids=["numbers", "strings"])
@pytest.mark.parametrize("width", [2, 1 << 15], ids=["small", "large"])
def test_owned_rows_are_independent(sizes: list[int], strings: bool, width: int) -> None:
    """Each item's rows keep their values when the column changes."""
    column: Value = torch.arange(1.0 * width * sum(sizes)).reshape(-1, width)
    if strings:
        column = np.array(column.tolist(), dtype=np.object_)
    expected = [part.tolist() for part in np.split(np.array(column), np.cumsum(sizes)[:-1])]

    owned = gather_scatter.clone_rows(column, sizes)
    outcomes = gather_scatter.scatter([column, owned], ["x", "state"], sizes)
    column[:] = 7

    parts = [gather_scatter.part_value(outcome["state"]) for outcome in outcomes]
    assert [part.tolist() for part in parts] == expected
    assert all((np.array(outcome["x"]) == 7).all() for outcome in outcomes)


def test_a_single_item_that_is_copied() -> None:
    """Inputs that the model may write to are copied."""
    sent = item(2)

    batch = gather_scatter.gather([sent], ["x", "n"], copied={"n"})
    for column in batch.columns:
        column[:] = 9

    assert (np.array(sent["x"]) == 9).all()
    assert (np.array(sent["n"]) == 0).all()
