"""The parts of a plain model's call."""

from __future__ import annotations

import build
import pytest

from torch_py_backend.engine import plain_call


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
    buffers = plain_call.page_locked(config, ["a", "b"])
    assert [buffer.shape for buffer in buffers] == [(16, *dims)] * count
