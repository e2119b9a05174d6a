from __future__ import annotations

import dataclasses
from typing import Any

import build
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.errors import InputError, OutputError
from torch_py_backend.pipeline import outputs as extraction
from torch_py_backend.values import Value

ROWS = 3
ONE = {"max_batch_size": 0}
FLAT = torch.ones(3, 2)


def verified(
    part: Any, dtype: str = "FP32", dims: tuple[int, ...] = (2,), rows: int = ROWS, **overrides: Any
) -> Value:
    """Return the output for a part and a number of rows."""
    config = build.config(outputs=(build.spec("y", dtype, dims),), **overrides)
    return extraction.Output(config, config.outputs[0]).verify(part, rows)


def refusal(part: Any, *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(OutputError) as raised:
        verified(part, *arguments, **keywords)
    text = str(raised.value)
    assert text.startswith("output 'y' ")
    return text.removeprefix("output 'y' ")


@pytest.mark.parametrize(
    ("overrides", "dims", "shape", "expected"),
    [
        ({}, (-1, 2), (3, 0, 2), (3, 0, 2)),
        ({}, (), (3,), (3,)),
        (ONE, (-1,), (5,), (5,)),
        ({}, (1, 1), (3,), (3, 1, 1)),
        (ONE, (1, 1), (), (1, 1)),
    ],
)
def test_missing_dimensions_of_1_are_added_and_nothing_is_copied(
    overrides: Any, dims: Any, shape: Any, expected: Any
) -> None:
    part = torch.rand(shape)
    output = verified(part, dims=dims, **overrides)
    assert isinstance(output, Tensor)
    assert output.shape == expected
    assert output.data_ptr() == part.data_ptr()
    assert output is part or shape != expected


class Image(Tensor):
    """A tensor with operators of its own, as those of torchvision and fastai."""


@pytest.mark.parametrize(
    ("part", "overrides"),
    [
        (np.arange(6, dtype=np.float32)[::-1].reshape(3, 2), {}),
        (np.broadcast_to(np.float32(3), (3, 2)), {}),
        (np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2], {}),
        (np.array(3, dtype=np.float32), ONE),
        (np.float32(3), ONE),
        (2.0, ONE),
        (FLAT.as_subclass(Image), {}),
        (nn.Parameter(FLAT), {}),
        (torch.tensor([1j]).conj().imag, ONE),  # negated when it is read
    ],
)
@pytest.mark.filterwarnings("error")
def test_numbers_arrays_and_subclasses_are_outputs(part: Any, overrides: dict[str, Any]) -> None:
    output = verified(part, dims=(1,) if overrides else (2,), **overrides)
    assert type(output) is Tensor
    assert output.is_contiguous()
    assert not output.is_neg()
    assert not output.requires_grad
    expected = part.tolist() if np.ndim(part) else [float(part)]
    assert output.tolist() == expected


@pytest.mark.parametrize(
    ("part", "overrides", "dims", "expected"),
    [
        (["a", "b", "c"], {}, (), ["a", "b", "c"]),
        (("a", "b", "c"), {}, (1,), [["a"], ["b"], ["c"]]),
        (list("abcdef"), {}, (-1,), [["a", "b"], ["c", "d"], ["e", "f"]]),
        ([["a", "b"]] * 3, {}, (-1,), [["a", "b"]] * 3),
        ([b"\xff", "ä", b""], {}, (), [b"\xff", "ä", b""]),
        (np.array(["a", "b", "c"]), {}, (1,), [["a"], ["b"], ["c"]]),
        (b"a", ONE, (-1,), [b"a"]),
        (list("abcd"), ONE, (2, -1), [["a", "b"], ["c", "d"]]),
    ],
)
def test_strings_get_the_shape_of_the_config(
    part: Any, overrides: dict[str, Any], dims: tuple[int, ...], expected: Any
) -> None:
    output = verified(part, "BYTES", dims, **overrides)
    assert isinstance(output, np.ndarray)
    assert output.dtype == np.object_
    assert output.tolist() == expected


@pytest.mark.parametrize(
    ("part", "dtype", "dims", "overrides", "message"),
    [
        (torch.ones(3, 5), "FP32", (2,), {}, "is float32 [3, 5]; expected float32 [-1, 2] as in"),
        (torch.ones(3, 5), "FP32", (2,), {}, "data_type: TYPE_FP32 dims: [ 5 ]."),
        (torch.ones(3, 5), "FP32", (2,), ONE, "data_type: TYPE_FP32 dims: [ 3, 5 ]."),
        (torch.ones(3).double(), "FP32", (2,), {}, "data_type: TYPE_FP64 dims: [ 1 ]."),
        (torch.ones(3), "FP32", (-1,), {}, "is float32 [3]; expected"),
        (torch.ones(4), "FP32", (1,), {}, "has 4 rows for a batch of 3"),
        (np.ones((3, 2)), "FP32", (2,), {}, "is float64 [3, 2]; expected float32 [-1, 2]"),
        (["a", "b", "c"], "FP32", (), {}, "is strings [3]; expected float32 [-1]"),
        (None, "FP32", (2,), {}, "is a NoneType; expected a tensor, an array, or a list of"),
        (["a", "b"], "BYTES", (1,), {}, "is strings [2]; expected strings [-1, 1] as in"),
        (["a"] * 4, "BYTES", (), {}, "has 4 rows for a batch of 3"),
        ([["a"]] * 3, "BYTES", (2,), {}, "is strings [3, 1]; expected"),
        (list("abcd"), "BYTES", (-1,), {}, "is strings [4]; expected"),
        ([["a"], ["b", "c"]], "BYTES", (-1,), {}, "is a list; expected a tensor, an array, or"),
        ([[["a", "b"], ["c", "d"]], ["e", "f"]], "BYTES", (-1,), {}, "is "),
        (np.ones(3), "BYTES", (), {}, "is float64 [3]; expected strings [-1]"),
        (np.array(["a", None]), "BYTES", (), {}, "is an ndarray; expected a"),
    ],
)
def test_a_part_that_contradicts_the_config_is_refused_with_what_to_write(
    part: Any, dtype: str, dims: tuple[int, ...], overrides: dict[str, Any], message: str
) -> None:
    text = refusal(part, dtype, dims, **overrides)
    assert text.endswith(message) if message.startswith("data_type") else text.startswith(message)


@pytest.mark.parametrize(
    ("part", "dtype", "reshaped", "served"),
    [
        pytest.param(torch.rand(3, 16), "FP32", False, True, id="numbers"),
        pytest.param([["a"] * 16] * 3, "BYTES", False, True, id="strings"),
        pytest.param(torch.rand(4, 16), "FP32", False, False, id="rows"),
        pytest.param(torch.tensor(1.0), "FP32", False, False, id="no rows"),
        pytest.param(torch.rand(3, 16), "FP32", True, False, id="reshape"),
    ],
)
def test_other_shapes_of_torchscript_are_served_with_one_warning_if_they_can_be(
    part: Any, dtype: str, reshaped: bool, served: bool, caplog: pytest.LogCaptureFixture
) -> None:
    spec = dataclasses.replace(build.spec("y", dtype, (2,)), reshaped=reshaped)
    verify = extraction.Output(build.config(outputs=(spec,)), spec, any_shape=True).verify
    if not served:
        with pytest.raises(OutputError):
            verify(part, ROWS)
        return
    for _ in range(2):
        assert verify(part, ROWS).shape == (3, 16)
    (message,) = caplog.messages
    assert "output 'y' is [3, 16], and config.pbtxt says [-1, 2]" in message


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("cast", [None, "BF16"])
def test_a_tensor_without_dense_values_is_refused_and_not_cast(cast: str | None) -> None:
    for part, form in (
        (FLAT.to_sparse(), "a nested, sparse or empty tensor: torch.sparse_coo on cpu"),
        (FLAT.to("meta"), "a nested, sparse or empty tensor: torch.strided on meta"),
        (FLAT.to(torch.complex64), "complex64 [3, 2]"),
        (torch.quantize_per_tensor(FLAT, 0.1, 0, torch.quint8), "quint8 [3, 2]"),
        (torch.nested.nested_tensor([FLAT, FLAT]).double(), "a nested, sparse or empty tensor"),
    ):
        assert refusal(part, cast_inputs=cast).startswith(f"is {form}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_cast_inputs_converts_floating_point_results_back(dtype: torch.dtype) -> None:
    part = torch.tensor([[1.5, 2.0]]).to(dtype)
    output = verified(part, rows=1, cast_inputs="BF16")
    assert torch.equal(torch.as_tensor(output), torch.tensor([[1.5, 2.0]]))
    assert refusal(part, rows=1).startswith("is ")
    assert refusal(part, "INT64", rows=1, cast_inputs="BF16").startswith("is ")
    assert refusal(part.long(), rows=1, cast_inputs="BF16").startswith("is int64")


def test_an_output_that_is_not_finite_is_refused_by_name() -> None:
    specs = (build.spec("n", "INT64"), build.spec("a"), build.spec("b"), build.spec("s", "BYTES"))
    check = extraction.finite_only(build.config(outputs=specs))
    large = torch.tensor([[3e38, 3e38]])  # their sum is infinite
    good: dict[str, Any] = {"n": large.long(), "a": large, "b": large, "s": np.array([["a"]])}
    refusal = InputError("refused before")
    assert [check(good), check(refusal)] == [good, refusal]
    refused = check(good | {"b": torch.tensor([[torch.inf, 0]])})
    assert isinstance(refused, OutputError)
    assert refused.reported
    assert "output 'b' holds NaN or infinity" in str(refused)


def test_strings_that_cannot_be_sent_are_refused() -> None:
    """They would fail the responses of the whole batch."""
    config = build.config(outputs=(build.spec("y", "BYTES", ()),))
    with pytest.raises(OutputError, match=r"forward\(\) returned .* 'utf-8' codec can't encode"):
        extraction.extractor(config)(["a", "\udcff"], 2)
