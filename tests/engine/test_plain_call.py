"""The parts of a plain model's call."""

from __future__ import annotations

from collections.abc import Sequence

import build
import pytest
import torch

from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import Value
from torch_py_backend.config.options import Options
from torch_py_backend.engine import plain_call

CPU = runtime.create(Options(), torch.device("cpu"), ())


@pytest.mark.parametrize(
    ("dims", "dtype", "count"),
    [
        pytest.param((1 << 20,), "FP32", 2, id="64 MiB"),
        pytest.param((1 << 21,), "FP32", 2, id="256 MiB"),
        pytest.param((3 << 19,), "FP32", 2, id="192 MiB, as powers of two 256"),
        pytest.param(((1 << 21) + 1,), "FP32", 0, id="more as powers of two"),
        pytest.param((1 << 30,), "FP64", 0, id="128 GiB"),
        pytest.param((4,), "BF16", 0, id="not in numpy"),
        pytest.param((-1,), "FP32", 0, id="dims that are not fixed"),
    ],
)
def test_page_locked_memory(dims: tuple[int, ...], dtype: str, count: int) -> None:
    """Batches are gathered in page-locked memory of 256 MiB at most, if numpy can write them."""
    inputs = tuple(build.spec(name, dtype, dims) for name in ("a", "b"))
    config = build.config(inputs=inputs, max_batch_size=16)
    buffers = plain_call.page_locked(config, ["a", "b"], CPU).columns
    assert [buffer.shape for buffer in buffers] == [(16, *dims)] * count


def test_small_inputs_are_sent_by_one_copy() -> None:
    """Each batch arrives whole, as aligned columns whose memory the next batch does not change."""
    inputs = (build.spec("ids", "INT64", (3,)), build.spec("mask", "BOOL", (5,)), build.spec("x"))
    config = build.config(inputs=inputs, max_batch_size=4)
    columns, send = plain_call.page_locked(config, ["x", "ids", "mask"], CPU)
    assert len({column.untyped_storage().data_ptr() for column in columns}) == 1
    sent: list[tuple[Sequence[Value], list[torch.Tensor]]] = []
    for rows in (4, 1, 3):
        batch = [column[:rows] for column in columns]
        for number, column in enumerate(batch):
            column.copy_(torch.randint(0, 2 + rows, column.shape) + number)
        sent.append((send(batch), [column.clone() for column in batch]))
    for received, expected in sent:
        for column, values in zip(map(torch.as_tensor, received), expected, strict=True):
            assert column.dtype == values.dtype
            assert torch.equal(column, values)
            assert column.is_contiguous()
            assert column.storage_offset() * column.itemsize % 512 == 0
            assert column.untyped_storage().nbytes() == 3 * 512


@pytest.mark.parametrize(
    ("names", "values"),
    [pytest.param(["a", "b"], 16385, id="large"), pytest.param(["a"], 4, id="a single input")],
)
def test_other_inputs_are_sent_each(names: list[str], values: int) -> None:
    """Large inputs are not copied once more, nor rows that a batch does not have."""
    inputs = tuple(build.spec(name, dims=(values,)) for name in names)
    config = build.config(inputs=inputs, max_batch_size=1)
    columns, send = plain_call.page_locked(config, names, CPU)
    assert send == CPU.to_device
    assert len({column.untyped_storage().data_ptr() for column in columns}) == len(names)
