import pytest
import torch
from torch import Tensor

from torch_py_backend import batching
from torch_py_backend.batching import Item


def item(rows: int, start: float = 0.0, width: int = 2) -> Item:
    x = torch.arange(rows * width, dtype=torch.float32).reshape(rows, width) + start
    return {"x": x, "n": torch.full((rows, 1), start, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("widths", "groups"),
    [
        pytest.param([2], [[0]], id="one"),
        pytest.param([2, 2, 2], [[0, 1, 2]], id="alike"),
        pytest.param([2, 3, 2, 4, 3], [[0, 2], [1, 4], [3]], id="three shapes"),
    ],
)
def test_items_of_one_shape_form_a_group(widths: list[int], groups: list[list[int]]) -> None:
    """Items are batched with those of their shape, in the order in which they came."""
    items = [item(rows=1 + position, width=width) for position, width in enumerate(widths)]

    assert batching.group(items, ["x", "n"]) == groups


def test_any_input_keeps_items_apart() -> None:
    """It is enough that one of the inputs differs in shape."""
    first, second = item(1), item(1)
    second["n"] = torch.zeros(1, 7, dtype=torch.int64)

    assert batching.group([first, second], ["x", "n"]) == [[0], [1]]
    assert batching.group([first, second], ["x"]) == [[0, 1]]


def test_devices_keep_items_apart() -> None:
    """Tensors on different devices cannot be concatenated and are not asked to be."""
    first, second = item(1), item(1)
    second["x"] = second["x"].to("meta")

    assert batching.group([first, second], ["x", "n"]) == [[0], [1]]


def test_number_of_dimensions_keeps_items_apart() -> None:
    """[rows] and [rows, 1] are different shapes."""
    items = [{"x": torch.ones(2)}, {"x": torch.ones(2, 1)}]

    assert batching.group(items, ["x"]) == [[0], [1]]


@pytest.mark.parametrize("sizes", [[1, 1], [3, 1, 2], [2, 0, 1], [0, 0], [0, 5]], ids=str)
def test_what_is_gathered_is_scattered(sizes: list[int]) -> None:
    """Each item gets back the rows that it brought, and no other's."""
    items = [item(rows, start=100.0 * position) for position, rows in enumerate(sizes)]

    batch = batching.gather(items, ["n", "x"])
    outcomes = batching.scatter(batch.columns, ["n", "x"], batch.sizes)

    assert list(batch.sizes) == sizes
    assert [column.shape for column in batch.columns] == [(sum(sizes), 1), (sum(sizes), 2)]
    assert len(outcomes) == len(items)
    for outcome, sent in zip(outcomes, items, strict=True):
        assert all(torch.equal(outcome[name], sent[name]) for name in ("x", "n"))


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_single_item_is_not_copied(rows: int) -> None:
    """One item goes in and out as the very tensors that the request brought."""
    sent = item(rows)

    batch = batching.gather([sent], ["x", "n"])
    (outcome,) = batching.scatter(batch.columns, ["x", "n"], batch.sizes)

    assert list(batch.sizes) == [rows]
    assert outcome["x"] is sent["x"]
    assert outcome["n"] is sent["n"]


def test_single_item_may_have_no_dimension() -> None:
    """A model without a batch dimension takes and gives a tensor without any."""
    sent = {"x": torch.tensor(3.0)}

    batch = batching.gather([sent], ["x"])

    assert batching.scatter(batch.columns, ["y"], batch.sizes) == [{"y": sent["x"]}]


def test_columns_are_in_the_order_asked_for() -> None:
    """The order of a request's inputs does not matter, and inputs nobody asks for are left."""
    items = [{**item(1), "extra": torch.ones(1)}, dict(reversed(item(2).items()))]

    batch = batching.gather(items, ["n", "x"])

    assert [column.dtype for column in batch.columns] == [torch.int64, torch.float32]


def test_gathered_columns_are_new_memory() -> None:
    """A model that writes into its input does not reach into a request."""
    items = [item(1), item(1)]

    batching.gather(items, ["x"]).columns[0].fill_(-1.0)

    assert torch.equal(items[0]["x"], item(1)["x"])


def test_scattered_rows_are_contiguous_views() -> None:
    """Splitting copies nothing, and every part can be sent as it lies in memory."""
    output = torch.arange(12.0).reshape(6, 2)

    outcomes = batching.scatter([output], ["y"], [1, 3, 2])

    parts: list[Tensor] = [outcome["y"] for outcome in outcomes]
    assert all(part.is_contiguous() for part in parts)
    assert [part.data_ptr() - output.data_ptr() for part in parts] == [0, 8, 32]
