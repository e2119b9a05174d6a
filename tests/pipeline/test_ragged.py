"""batch_input and batch_output: flat inputs, what is made of their shapes, split outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import build
import numpy as np
import pytest
import torch
from engines import check, engine, texts
from torch import Tensor

from torch_py_backend.config import dtypes
from torch_py_backend.config.model_config import BatchInput
from torch_py_backend.engine import warmup
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import ForwardError, OutputError
from torch_py_backend.pipeline import ragged as flattening
from torch_py_backend.values import Item


def create_engine(forward: Callable[..., Any], dtype: str = "FP32", **overrides: Any) -> Engine:
    """A ragged input x, its element counts n, and an output y of its shape."""
    counts = BatchInput("n", "BATCH_ELEMENT_COUNT", dtypes.from_triton("FP32"), "x")
    return engine(
        forward,
        inputs=(dataclasses.replace(build.spec("x", dtype, (-1,)), ragged=True),),
        outputs=(build.spec("y", dtype, (-1,)),),
        batch_inputs=(counts,),
        batch_outputs={"y": "x"},
        **overrides,
    )


def item(value: float, *shape: int) -> Item:
    return {"x": np.full(shape, value, dtype=np.float32)}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ELEMENT_COUNT", [6, 1, 8]),
        ("ACCUMULATED_ELEMENT_COUNT", [6, 7, 15]),
        ("ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 6, 7, 15]),
        ("MAX_ELEMENT_COUNT_AS_SHAPE", [0] * 8),
        ("ITEM_SHAPE", [[2, 3], [1, 1], [1, 4], [1, 4]]),
        ("ITEM_SHAPE_FLATTEN", [2, 3, 1, 1, 1, 4, 1, 4]),
    ],
)
def test_batch_inputs_say_the_shapes_of_requests_or_of_their_rows(
    kind: str, expected: list[Any]
) -> None:
    for dtype, numbers in (("INT32", torch.int32), ("FP32", torch.float32)):
        made = BatchInput("n", f"BATCH_{kind}", dtypes.from_triton(dtype), "x")
        shapes = ((1, 2, 3), (1, 1, 1), (2, 1, 4))
        values = [torch.ones(shape) for shape in shapes]
        make: Any = flattening.batch_input(made)
        assert make([value.to("meta") for value in values]).is_meta
        column = make(values)
        assert column.dtype is numbers
        assert column.tolist() == expected


@pytest.mark.usefixtures("dynamo")
def test_compiled_models_take_any_number_of_values() -> None:
    parameters = {"backend": "eager", "fullgraph": True}
    model = create_engine(lambda x, n: x * 2, torch_compile_optional_parameters=parameters)
    warmup.run(model)
    sent = [item(1, 1, 3), item(2, 2, 5)]
    assert check(sent, model.run(sent), ForwardError) == []
    assert model.counts.eager_calls == 0


def test_ragged_strings_are_one_flat_list() -> None:
    model = create_engine(lambda x, n: [text.upper() for text in x], "BYTES")
    first, second = model.run([{"x": texts([b"a", b"b"])}, {"x": texts([b"c"])}])
    assert [first["y"].tolist(), second["y"].tolist()] == [[["A", "B"]], [["C"]]]


def test_a_batch_output_with_another_number_of_values_is_refused() -> None:
    model = create_engine(lambda x, n: x[1:], retry_failed_batch=False)
    for outcome in model.run([item(1, 1, 3), item(2, 2, 2)]):
        assert isinstance(outcome, OutputError)
        assert "output 'y' has 6 values; expected 7, as batch_output says" in str(outcome)


def test_casts_leave_counts_alone() -> None:
    # Half precision cannot hold every offset.
    def forward(x: Tensor, n: Tensor) -> Tensor:
        assert (x.dtype, n.dtype) == (torch.bfloat16, torch.float32)
        assert n.tolist() == [4097.0]
        return x.float() * 2

    model = create_engine(forward, cast_inputs="BF16")
    sent = [item(1, 1, 4097)]
    assert check(sent, model.run(sent), ForwardError) == []
