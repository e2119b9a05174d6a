"""batch_input and batch_output: flat inputs, what is made of their shapes, split outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import build
import numpy as np
import pytest
import torch
from engines import check, engine
from torch import Tensor

from torch_py_backend.config import dtypes
from torch_py_backend.config.model_config import BatchInput, BatchOutput, ModelConfig
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import (
    ForwardError,
    OutputError,
)
from torch_py_backend.pipeline.inputs import Inputs
from torch_py_backend.signature import introspection
from torch_py_backend.values import ANY_ROWS, Item, Rows


def batch_input(
    kind: str = "BATCH_ELEMENT_COUNT", dtype: str = "INT32", name: str = "n"
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


def test_batch_inputs_are_on_the_device_of_their_source() -> None:
    """What is made of the shapes of tensors elsewhere is copied there."""
    (n, x), _ = gathered(
        config(), [{"x": torch.ones(1, length, device="meta")} for length in (3, 2)]
    )
    assert n.device == x.device == torch.device("meta")
    assert x.shape == (5,)


def test_casts_leave_counts_alone() -> None:
    """CAST_INPUTS does not apply to counts: half precision cannot hold every offset."""

    def forward(x: Tensor, n: Tensor) -> Tensor:
        assert (x.dtype, n.dtype) == (torch.bfloat16, torch.float32)
        assert n.tolist() == [4097.0]
        return x.float() * 2

    model = create_engine(forward, cast_inputs="BF16", batch_inputs=(batch_input(dtype="FP32"),))
    sent = [item(1, 1, 4097)]
    assert check(sent, model.run(sent), ForwardError) == []
