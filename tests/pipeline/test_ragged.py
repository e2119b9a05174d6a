"""batch_input and batch_output: flat inputs, what is made of their shapes, split outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import build
import numpy as np
import pytest
import torch
from engines import BAD, bad, check, engine
from torch import Tensor

from torch_py_backend.config import dtypes
from torch_py_backend.config.batch_io import BatchInput, BatchInputKind, BatchOutput
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import warmup
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import (
    BindingError,
    ForwardError,
    OutputError,
)
from torch_py_backend.loading import example_inputs
from torch_py_backend.pipeline.inputs import Inputs
from torch_py_backend.signature import introspection
from torch_py_backend.values import ANY_ROWS, Item, Rows


def batch_input(
    kind: BatchInputKind = BatchInputKind.ELEMENT_COUNT, dtype: str = "INT32", name: str = "n"
) -> BatchInput:
    return BatchInput(name, kind, dtypes.from_triton(dtype), "x")


def ragged(name: str = "x", dims: tuple[int, ...] = (-1,), dtype: str = "FP32") -> Any:
    return dataclasses.replace(build.spec(name, dtype, dims), ragged=True)


# A ragged input x, its element counts n, and an output y of its shape.
_FIELDS: dict[str, Any] = {
    "inputs": (ragged(),),
    "outputs": (build.spec("y", dims=(-1,)),),
    "batch_inputs": (batch_input(),),
    "batch_outputs": (BatchOutput("y", "x"),),
}


def config(**overrides: Any) -> ModelConfig:
    return build.config(**_FIELDS | overrides)


def create_engine(forward: Callable[..., Any], rows: Rows = ANY_ROWS, **overrides: Any) -> Engine:
    return engine(forward, rows, **_FIELDS | overrides)


def item(value: float, *shape: int) -> Item:
    return {"x": np.full(shape, value, dtype=np.float32)}


def gathered(settings: ModelConfig, items: Sequence[Item]) -> tuple[Sequence[Any], Sequence[int]]:
    """Return the columns of n and x, and the rows of each item."""
    inputs = Inputs(settings, introspection.from_function(lambda n, x: (n, x)))
    _, (group,) = inputs.stage(lambda binding: lambda *columns: columns)(items)
    columns, sizes = group.gather(group.items)
    return columns, sizes


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        (BatchInputKind.ELEMENT_COUNT, "INT32", [6, 12, 1]),
        (BatchInputKind.ACCUMULATED_ELEMENT_COUNT, "FP32", [6, 18, 19]),
        (BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO, "INT32", [0, 6, 18, 19]),
        (BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE, "FP32", [0] * 12),
        (BatchInputKind.ITEM_SHAPE, "INT32", [[2, 3], [3, 2], [3, 2], [1, 1]]),
        (BatchInputKind.ITEM_SHAPE_FLATTEN, "FP32", [2, 3, 3, 2, 3, 2, 1, 1]),
    ],
)
def test_batch_inputs(kind: BatchInputKind, dtype: str, expected: list[Any]) -> None:
    """Counts are those of requests with all their rows; item shapes are those of rows."""
    settings = config(inputs=(ragged(dims=(-1, -1)),), batch_inputs=(batch_input(kind, dtype),))
    items = [item(1, 1, 2, 3), item(2, 2, 3, 2), item(3, 1, 1, 1)]
    (column, x), sizes = gathered(settings, items)
    assert column.dtype == {"INT32": torch.int32, "FP32": torch.float32}[dtype]
    assert column.tolist() == expected
    assert x.tolist() == [1.0] * 6 + [2.0] * 12 + [3.0]
    assert sizes == [1, 2, 1]


@pytest.mark.parametrize("rows", [8, 0])
def test_a_single_request_is_flattened_too(rows: int) -> None:
    """The model gets one dimension for any number of requests; a single one is not copied."""
    sent = item(1, 1, 4)
    (n, column), sizes = gathered(config(max_batch_size=rows), [sent])
    assert (column.shape, n.tolist(), list(sizes)) == ((4,), [4], [1])
    assert np.shares_memory(column.numpy(), np.asarray(sent["x"]))


def test_strings() -> None:
    """Ragged strings are one flat list, as LibTorch passes them."""
    model = create_engine(
        lambda x, n: [text.upper() for text in x],
        inputs=(ragged(dtype="BYTES"),),
        outputs=(build.spec("y", "BYTES", (-1,)),),
    )
    sent: list[Item] = [
        {"x": np.array([[b"a", b"b"]], dtype=np.object_)},
        {"x": np.array([[b"c"]], dtype=np.object_)},
    ]
    first, second = model.run(sent)
    assert first["y"].tolist() == [["A", "B"]]
    assert second["y"].tolist() == [["C"]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x[1:], "output 'y' has 6 values; expected 7, as batch_output says"),
        (lambda x: x.double(), "output 'y' is float64 [7]; expected float32"),
    ],
    ids=["too few", "type"],
)
def test_results_that_cannot_be_split(result: Callable[[Tensor], Tensor], message: str) -> None:
    """A batch output with another number of values is an error."""
    model = create_engine(lambda x, n: result(x), retry_failed_batch=False)
    outcomes = model.run([item(1, 1, 3), item(2, 2, 2)])
    assert all(
        isinstance(outcome, OutputError) and message in str(outcome) for outcome in outcomes
    ), outcomes


def test_one_dimension_without_batch_inputs() -> None:
    """Without batch inputs a batch output of fixed dims is split by rows."""

    def forward(x: Tensor) -> Tensor:
        assert x.dim() == 1
        return x.reshape(-1, 2).sum(1)

    model = create_engine(forward, outputs=(build.spec("y", dims=(1,)),), batch_inputs=())
    outcomes = model.run([item(1, 1, 2), item(2, 3, 2)])
    values = [outcome["y"].tolist() for outcome in outcomes]
    assert values == [[[2.0]], [[4.0], [4.0], [4.0]]]


def double(x: Tensor, n: Tensor) -> Tensor:
    assert int(n.sum()) == x.shape[0]
    bad(x)
    return x * 2


def test_only_failing_requests_get_the_error() -> None:
    """Batch inputs are created again for each part of a failed batch."""
    guilty = [0, 2, 4]
    sent = [
        item(BAD if place in guilty else place, 1 + place % 2, length)
        for place, length in enumerate([3, 1, 4, 1, 5, 9])
    ]
    assert check(sent, create_engine(double).run(sent), ForwardError) == guilty


@pytest.mark.parametrize("rows", [Rows(4, 4), Rows(2)])
def test_row_counts_of_a_program(rows: Rows) -> None:
    """Ragged batches are not filled up: their first dimension is not rows."""
    sent = [item(1, 1, 3)]
    assert check(sent, create_engine(double, rows).run(sent), ForwardError) == []


def test_requests_of_any_shape_share_a_call() -> None:
    """Only the shapes of other inputs must be equal."""
    calls = []

    def forward(x: Tensor, z: Tensor, n: Tensor) -> Tensor:
        calls.append(len(n))
        return x * 2

    sent: list[Item] = [
        item(size, 1, size, 2) | {"z": np.ones((1, other), np.float32)}
        for size, other in ((1, 1), (2, 1), (3, 2), (4, 1))
    ]
    inputs = (ragged(dims=(-1, 2)), build.spec("z", dims=(-1,)))
    outputs = (build.spec("y", dims=(-1, 2)),)
    model = create_engine(forward, inputs=inputs, outputs=outputs)

    assert check(sent, model.run(sent), ForwardError) == []
    assert calls == [3, 1]


def test_batch_inputs_are_on_the_device_of_their_source() -> None:
    """What is made of the shapes of tensors elsewhere is copied there."""
    (n, x), _ = gathered(config(), [{"x": torch.ones(1, 3, device="meta")}])
    assert n.device == x.device == torch.device("meta")


def test_casts_leave_counts_alone() -> None:
    """CAST_INPUTS does not apply to counts: half precision cannot hold every offset."""

    def forward(x: Tensor, n: Tensor) -> Tensor:
        assert (x.dtype, n.dtype) == (torch.bfloat16, torch.float32)
        assert n.tolist() == [4097.0]
        return x.float() * 2

    model = create_engine(forward, cast_inputs="BF16", batch_inputs=(batch_input(dtype="FP32"),))
    sent = [item(1, 1, 4097)]
    assert check(sent, model.run(sent), ForwardError) == []


def test_an_argument_that_takes_a_number() -> None:
    """A batch input has a value for each request, so no scalar argument can take it."""

    def forward(x: Tensor, n: int) -> Tensor:
        return x * n

    with pytest.raises(BindingError) as raised:
        create_engine(forward)
    assert "batch_input makes 'n' a tensor, and forward() takes an int" in str(raised.value)


@pytest.mark.parametrize("rows", [8, 0])
def test_the_warm_up_sends_requests_of_one_row(rows: int) -> None:
    """A model that returns a row for each count fails for a request of several rows."""
    counts: set[int] = set()

    def forward(x: Tensor, n: Tensor) -> Tensor:
        counts.add(len(n))
        return torch.stack([part.sum() for part in x.split(n.tolist())]).unsqueeze(1)

    outputs = (build.spec("y", dims=(1,) if rows else (1, 1)),)
    model = create_engine(forward, max_batch_size=rows, outputs=outputs, batch_outputs=())
    warmup.run(model)
    assert counts == ({8, 2, 1} if rows else {1})
    assert len(example_inputs.requests(model.config, item(1, 3, 2))) == (3 if rows else 1)
