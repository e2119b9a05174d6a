"""Padding of inputs, and cutting of outputs."""

from __future__ import annotations

import math
from typing import Any

import build
import numpy as np
import pytest
import torch
from torch import Tensor

from torch_py_backend.config.model_config import TensorSpec
from torch_py_backend.errors import ConfigError
from torch_py_backend.pipeline.padding import MOST_GROWTH, Pad, Padding


def spec(
    name: str, dtype: str = "INT64", dims: tuple[int, ...] = (-1,), **fields: Any
) -> TensorSpec:
    return TensorSpec(name, build.spec("x", dtype).dtype, dims, **{"ragged": True, **fields})


IDS, MASK = spec("ids"), spec("mask", optional=True)


def create(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...] = (), **pad: dict[str, Any]
) -> Padding:
    return Padding(build.config(inputs=inputs, outputs=outputs, pad=pad))


# --- inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pad", "lengths", "expected"),
    [
        pytest.param(Pad((1,), 2, 0, False, 1), [2, 3], [[1, 1, 0], [1, 1, 1]], id="right"),
        pytest.param(Pad((1,), 2, 9, True, 1), [2, 3], [[9, 1, 1], [1, 1, 1]], id="left, a value"),
        pytest.param(Pad((1,), 2, 0, False, 4), [2, 3], [[1, 1, 0, 0], [1, 1, 1, 0]], id="rounded"),
        pytest.param(Pad((1,), 2, 0, False, 4), [2], [[1, 1, 0, 0]], id="one item, rounded"),
        pytest.param(Pad((1,), 2, 0, False, 1), [0, 2], [[0, 0], [1, 1]], id="nothing in one"),
        pytest.param(Pad((1,), 2, 0, False, 8), [0], [[]], id="nothing at all"),
    ],
)
def test_values_are_padded(pad: Pad, lengths: list[int], expected: list[list[int]]) -> None:
    """All values get the length of the longest, rounded up, and keep their type."""
    gathered = pad.gather([torch.ones(1, length, dtype=torch.int32) for length in lengths])
    assert gathered.tolist() == expected
    assert gathered.dtype is torch.int32
    single = torch.ones(1, 8)
    assert pad.gather([single]) is not single, "forward() may change its shape"


def test_several_axes_and_rows() -> None:
    """Images of different sizes share a batch, and their rows keep their order."""
    first, second = torch.full((2, 3, 1, 4), 1.0), torch.full((1, 3, 2, 2), 2.0)
    gathered = Pad((2, 3), 4, -1, False, 1).gather([first, second])
    assert isinstance(gathered, Tensor)
    assert gathered.shape == (3, 3, 2, 4)
    assert torch.equal(gathered[:2, :, :1], first)
    assert torch.equal(gathered[2:, :, :, :2], second)
    assert (gathered[:2, :, 1:] == -1).all()
    assert (gathered[2:, :, :, 2:] == -1).all()


def test_missing_mask_is_created() -> None:
    """A mask that a request leaves out marks all its values, in the mask's type; others stay."""
    padding = create((IDS, spec("mask", "BOOL", optional=True)), ids={"mask": "mask"})
    item = padding.fill({"ids": torch.zeros(2, 3, dtype=torch.int64)})
    result = item["mask"]
    assert isinstance(result, Tensor)
    assert result.dtype is torch.bool
    assert result.tolist() == [[1, 1, 1]] * 2
    assert padding.fill(item) is item
    assert padding.fill({}) == {}


@pytest.mark.parametrize(
    ("shapes", "optional", "refused"),
    [
        ({"ids": (2, 3), "mask": (2, 3)}, True, False),
        ({"ids": (2, 3), "mask": (2, 1)}, True, True),
        ({"ids": (2, 3), "mask": (2, 1)}, False, True),
        ({"mask": (2, 3)}, True, False),
    ],
)
def test_mask_of_another_size(
    shapes: dict[str, tuple[int, ...]], optional: bool, refused: bool
) -> None:
    """A mask of a request must be as long as its input."""
    padding = create((IDS, spec("mask", optional=optional)), ids={"mask": "mask"})
    refusal = padding.mismatch({name: torch.ones(shape) for name, shape in shapes.items()})
    message = "input 'mask' is [2, 1], and its input 'ids' is [2, 3]"
    assert (message in str(refusal)) if refused else refusal is None


def test_mask_is_padded_with_zeros_on_the_same_side() -> None:
    """The mask marks padding with zeros, whatever the padding value."""
    padding = create(
        (IDS, MASK), ids={"value": 7, "side": "left", "multiple_of": 4, "mask": "mask"}
    )
    gathered = padding.pads["mask"].gather([torch.ones(1, 3, dtype=torch.int64)])
    assert gathered.tolist() == [[0, 1, 1, 1]]


# --- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "multiple", "parts"),
    [
        pytest.param([(1, 9000)] + [(1, 5)] * 7, 1, [[0], [1, 2, 3, 4, 5, 6, 7]], id="order"),
        pytest.param([(1, 5)] * 3 + [(1, 9000)], 1, [[0, 1, 2, 3]], id="four times at most"),
        pytest.param([(1, 5)] * 4 + [(1, 9000)], 1, [[0, 1, 2, 3], [4]], id="five times"),
        pytest.param([(1, n) for n in range(1, 33)], 1, [list(range(32))], id="usual lengths"),
        pytest.param([(8, 0), (1, 9)], 1, [[0], [1]], id="nothing in one"),
        pytest.param([(1, 1)] * 8, 64, [list(range(8))], id="each is rounded up as it is"),
        pytest.param(
            [(1, 1)] * 20 + [(1, 100)] * 5 + [(1, 10_000)],
            1,
            [list(range(20)), list(range(20, 25)), [25]],
            id="three parts",
        ),
    ],
)
def test_long_items_do_not_pad_short_ones_without_bound(
    shapes: list[tuple[int, int]], multiple: int, parts: list[list[int]]
) -> None:
    """Padding makes a batch at most four times as large: a longer item gets its own call."""
    padding = create((IDS, MASK), ids={"mask": "mask", "multiple_of": multiple})
    items: list[Any] = [
        (place, padding.fill({"ids": torch.zeros(shape, dtype=torch.int64)}))
        for place, shape in enumerate(shapes)
    ]
    split = padding.split(items)
    assert [[place for place, _ in part] for part in split] == parts
    for part in split:
        alone = sum(_values(padding, [item]) for _, item in part)
        assert _values(padding, [item for _, item in part]) <= MOST_GROWTH * alone


def test_items_without_the_padded_input() -> None:
    """An optional input that a request leaves out pads nothing."""
    padding = create((IDS, MASK), ids={"mask": "mask"})
    items: list[Any] = [(0, {"x": torch.zeros(1, 2)}), (1, {"x": torch.zeros(7, 2)})]
    assert padding.split(items) == [items]


def _values(padding: Padding, items: list[Any]) -> int:
    """Return the number of values in a batch of these items, padding included."""
    columns = [
        padding.pads[name].gather([item[name] for item in items]) for name in ("ids", "mask")
    ]
    return sum(math.prod(column.shape) for column in columns)


# --- outputs -----------------------------------------------------------------------------------


_EIGHT = torch.arange(8)
_LISTED: dict[str, Any] = {"outputs": ["y"]}


@pytest.mark.parametrize(
    ("dims", "pad", "output", "expected"),
    [
        ((-1,), _LISTED | {"side": "left"}, _EIGHT.reshape(2, 4), [[2, 3], [4, 5, 6, 7]]),
        ((-1, 1), _LISTED, _EIGHT.reshape(2, 4, 1), [[[0], [1]], [[4], [5], [6], [7]]]),
        ((1, -1), _LISTED, _EIGHT.reshape(2, 1, 4), [[[0, 1]], [[4, 5, 6, 7]]]),
        ((-1,), {"outputs": []}, _EIGHT.reshape(2, 4), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ((-1,), _LISTED, torch.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
        ((4,), {}, torch.zeros(2, 4), [[0.0] * 4] * 2),
    ],
    ids=["left", "more behind", "other axis", "not listed", "own length", "fixed length"],
)
def test_listed_outputs_get_their_own_lengths(
    dims: tuple[int, ...], pad: dict[str, Any], output: Tensor, expected: list[Any]
) -> None:
    """Listed outputs as long as the padded input are cut, on the side that was padded."""
    padding = create((IDS,), (spec("y", "FP32", dims),), ids=pad)
    items: list[Any] = [{"ids": torch.zeros(1, length)} for length in (2, 4)]
    outcomes: list[dict[str, Any]] = [{"y": output[row : row + 1]} for row in range(2)]
    padding.cut(outcomes, items)
    assert [outcome["y"][0].tolist() for outcome in outcomes] == expected
    rows: list[dict[str, Any]] = [{"y": output}, {"y": output}]
    padding.cut(rows, [{"ids": torch.zeros(2, length)} for length in (2, 4)])
    assert all(outcome["y"].is_contiguous() for outcome in outcomes + rows)


def test_strings_are_cut_too() -> None:
    """Strings for padding are not sent."""
    padding = create((IDS,), (spec("y", "BYTES"),), ids=_LISTED)
    words = np.array([["a", "b", "?"]], dtype=np.object_)
    outcomes: list[dict[str, Any]] = [{"y": words}, {"y": words}]
    padding.cut(outcomes, [{"ids": torch.zeros(1, length)} for length in (2, 3)])
    assert outcomes[0]["y"].tolist() == [["a", "b"]]


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pad", "message"),
    [
        pytest.param({"x": {}}, "'x'; expected inputs of numbers with dims of -1", id="no input"),
        pytest.param({"text": {}}, "'text'", id="strings"),
        pytest.param({"fixed": {}}, "'fixed'", id="fixed"),
        pytest.param({"ids": {"value": 0.5}}, "the value 0.5 for 'ids'", id="value"),
        pytest.param({"bytes": {"value": 300}}, "the value 300 for 'bytes'", id="too large"),
        pytest.param({"ids": {"mask": "nope"}}, "the mask 'nope'", id="no mask"),
        pytest.param({"ids": {"mask": "ids"}}, "the mask 'ids'", id="its own mask"),
        pytest.param({"ids": {"mask": "fixed"}}, "the mask 'fixed'; .* dims", id="mask dims"),
        pytest.param({"ids": {"outputs": ["z"]}}, "the output 'z'", id="no output"),
        pytest.param({"ids": {"outputs": ["y"]}}, "the output 'y'", id="fixed output"),
    ],
)
def test_pad_that_does_not_fit(pad: dict[str, Any], message: str) -> None:
    """PAD must name inputs and outputs of the config that can be padded."""
    inputs = (IDS, MASK, spec("text", "BYTES"), spec("fixed", dims=(4,)), spec("bytes", "UINT8"))
    with pytest.raises(ConfigError, match=f"PAD names {message}"):
        create(inputs, (spec("y", dims=(4,)),), **pad)


def test_outputs_that_may_have_to_be_cut() -> None:
    """Outputs of any length must be listed, or an empty list must say that there are none."""
    outputs = (spec("y"), spec("z", dims=(4,)))
    with pytest.raises(ConfigError, match="which of the outputs y are as long as a padded input"):
        create((IDS, MASK), outputs, ids={}, mask={})
    create((IDS, MASK), outputs, ids={}, mask={"outputs": []})


@pytest.mark.parametrize("ragged", [True, False])
def test_input_that_triton_does_not_batch(ragged: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Without allow_ragged_batch Triton never batches different lengths: a warning says so."""
    create((spec("ids", ragged=ragged),), ids={})
    assert ("allow_ragged_batch: true" in caplog.text) is not ragged
