from __future__ import annotations

from typing import Any

import build
import numpy as np
import pytest
import torch
from torch import Tensor

from torch_py_backend.config.model_config import TensorSpec
from torch_py_backend.errors import ConfigError
from torch_py_backend.pipeline.padding import Pad, Padding
from torch_py_backend.values import Item, Value


def spec(
    name: str, dtype: str = "INT64", dims: tuple[int, ...] = (-1,), **fields: Any
) -> TensorSpec:
    return TensorSpec(name, build.spec("x", dtype).dtype, dims, **{"ragged": True, **fields})


IDS, MASK = spec("ids"), spec("mask", optional=True)


def create(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...] = (), **pad: dict[str, Any]
) -> Padding:
    return Padding(build.config(inputs=inputs, outputs=outputs, pad=pad))


@pytest.mark.parametrize(
    ("pad", "lengths", "expected"),
    [
        pytest.param(Pad((1,), 9, True, 1), [2, 3], [[9, 1, 1], [1, 1, 1]], id="left, a value"),
        pytest.param(Pad((1,), 0, False, 4), [2, 3], [[1, 1, 0, 0], [1, 1, 1, 0]], id="rounded"),
        pytest.param(Pad((1,), 0, False, 1), [0, 2], [[0, 0], [1, 1]], id="nothing in one"),
    ],
)
def test_values_get_the_length_of_the_longest_rounded_up(
    pad: Pad, lengths: list[int], expected: list[list[int]]
) -> None:
    for make in (torch.ones, np.ones):
        column = [make((1, length)) for length in lengths]
        gathered = pad.gather(column)
        assert gathered.tolist() == expected
        assert gathered.dtype is torch.as_tensor(column[0]).dtype
    single = torch.ones(1, 8)
    assert pad.gather([single]) is not single, "forward() may change its shape"


def test_images_of_different_sizes_share_a_batch() -> None:
    first, second = torch.full((2, 3, 1, 4), 1.0), torch.full((1, 3, 2, 2), 2.0)
    pad = Pad((2, 3), -1, False, 1)
    gathered = pad.gather([first, second])
    assert isinstance(gathered, Tensor)
    assert gathered.shape == (3, 3, 2, 4)
    assert torch.equal(gathered[:2, :, :1], first)
    assert torch.equal(gathered[2:, :, :, :2], second)
    assert (gathered[:2, :, 1:] == -1).all()
    assert (gathered[2:, :, :, 2:] == -1).all()
    classes = [pad.length_class(torch.ones(1, 3, size, size)) for size in (3, 4, 7, 8)]
    assert classes == [(2, 2), (3, 3), (3, 3), (4, 4)]


def test_a_mask_marks_all_values_if_it_is_left_out_or_is_as_long_as_its_input() -> None:
    padding = create((IDS, spec("mask", "BOOL", optional=True)), ids={"mask": "mask"})
    filled: Any = padding.fill({"ids": torch.zeros(2, 3, dtype=torch.int64)})
    mask = filled["mask"]
    assert mask.dtype is torch.bool
    assert mask.tolist() == [[True] * 3] * 2
    alone: Item = {"mask": torch.ones(2, 3)}
    assert padding.fill(alone) is alone
    sent: Item = {"ids": torch.ones(2, 3), "mask": torch.ones(2, 1)}
    assert "input 'mask' is [2, 1], and its input 'ids' is [2, 3]" in str(padding.fill(sent))


@pytest.mark.parametrize(
    ("shapes", "multiple", "parts"),
    [
        pytest.param([(1, 9000)] + [(1, 5)] * 7, 1, [[0], [1, 2, 3, 4, 5, 6, 7]], id="order"),
        pytest.param([(1, 5)] * 3 + [(1, 9000)], 1, [[0, 1, 2, 3]], id="four times at most"),
        pytest.param([(1, 5)] * 4 + [(1, 9000)], 1, [[0, 1, 2, 3], [4]], id="five times"),
        pytest.param([(8, 0), (1, 9)], 1, [[0], [1]], id="nothing in one"),
        pytest.param([(1, 1)] * 8, 64, [list(range(8))], id="each is rounded up as it is"),
        pytest.param(
            [(1, 1)] * 9 + [(1, 100), (1, 10_000)], 1, [[*range(9)], [9], [10]], id="three parts"
        ),
    ],
)
def test_padding_makes_a_batch_at_most_four_times_as_large(
    shapes: list[tuple[int, int]], multiple: int, parts: list[list[int]]
) -> None:
    padding = create((IDS, MASK), ids={"mask": "mask", "multiple_of": multiple})
    items: list[Any] = [
        padding.fill({"ids": torch.zeros(shape, dtype=torch.int64)}) for shape in shapes
    ]
    split = padding.split(range(len(items)), items)
    assert [list(places) for places, _ in split] == parts
    assert [member for _, members in split for member in members] == [
        items[place] for part in parts for place in part
    ]


def test_an_optional_input_that_is_left_out_pads_nothing() -> None:
    padding = create((IDS, MASK), ids={"mask": "mask"})
    items: list[Item] = [{"x": torch.zeros(1, 2)}, {"x": torch.zeros(7, 2)}]
    assert padding.split((3, 4), items) == [((3, 4), items)]


_EIGHT = torch.arange(8)
_WORDS = np.array([list("abcd"), list("efgh")], dtype=np.object_)
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
        ((-1,), _LISTED, _WORDS, [["a", "b"], ["e", "f", "g", "h"]]),
    ],
    ids=["left", "more behind", "other axis", "not listed", "own", "fixed", "strings"],
)
def test_listed_outputs_get_their_own_lengths(
    dims: tuple[int, ...], pad: dict[str, Any], output: Value, expected: list[Any]
) -> None:
    padding = create((IDS,), (spec("y", "FP32", dims),), ids=pad)
    for rows in (1, 2):
        outcomes: list[dict[str, Any]] = [{"y": output[row : row + rows]} for row in range(2)]
        padding.cut(outcomes, [{"ids": torch.zeros(rows, length)} for length in (2, 4)])
        assert [outcome["y"][0].tolist() for outcome in outcomes] == expected
        for outcome in outcomes:
            assert output is _WORDS or outcome["y"].is_contiguous()


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
def test_pad_must_name_inputs_and_outputs_that_can_be_padded(
    pad: dict[str, Any], message: str
) -> None:
    inputs = (IDS, MASK, spec("text", "BYTES"), spec("fixed", dims=(4,)), spec("bytes", "UINT8"))
    with pytest.raises(ConfigError, match=f"PAD names {message}"):
        create(inputs, (spec("y", dims=(4,)),), **pad)


def test_pad_must_say_which_outputs_are_as_long_as_an_input() -> None:
    outputs = (spec("y"), spec("z", dims=(4,)))
    with pytest.raises(ConfigError, match="which of the outputs y are as long as a padded input"):
        create((IDS, MASK), outputs, ids={}, mask={})
    create((IDS, MASK), outputs, ids={}, mask={"outputs": []})


@pytest.mark.parametrize("ragged", [True, False])
def test_a_padded_input_that_triton_does_not_batch_is_warned_about(
    ragged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    create((spec("ids", ragged=ragged),), ids={})
    assert ("allow_ragged_batch: true" in caplog.text) is not ragged
