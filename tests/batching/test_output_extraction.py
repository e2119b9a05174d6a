"""Extraction of outputs: check, reshape and make contiguous."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import build
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.batching import output_extraction
from torch_py_backend.batching.gather_scatter import Value
from torch_py_backend.errors import OutputError

ROWS = 3


def verified(
    part: Any, dtype: str = "FP32", dims: tuple[int, ...] = (2,), rows: int = ROWS, **overrides: Any
) -> Value:
    """Return the output for a part and a number of rows."""
    config = build.config(outputs=(build.spec("y", dtype, dims),), **overrides)
    (verify,) = output_extraction.verifiers(config)
    return verify(part, rows)


def refusal(part: Any, *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(OutputError) as raised:
        verified(part, *arguments, **keywords)
    text = str(raised.value)
    assert text.startswith("model 'digits': output 'y' ")
    return text


def strings(value: Value) -> Any:
    """Return an array of objects as lists."""
    assert isinstance(value, np.ndarray)
    assert value.dtype == np.object_
    return value.tolist()


# --- tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        pytest.param((2,), (3, 2), id="fixed"),
        pytest.param((-1,), (3, 7), id="variable"),
        pytest.param((-1, 2), (3, 0, 2), id="empty"),
        pytest.param((), (3,), id="rows alone"),
        pytest.param((1, 1), (3, 1, 1), id="ones"),
    ],
)
def test_matching_tensor_is_unchanged(dims: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """A tensor of the config's shape is not copied."""
    part = torch.rand(shape)

    assert verified(part, dims=dims) is part


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        pytest.param(torch.rand(3, 16), "FP32", id="size"),
        pytest.param(torch.rand(3), "FP32", id="rows alone"),
        pytest.param([["a"] * 16] * 3, "BYTES", id="strings"),
    ],
)
def test_contradicting_shapes_are_served_on_demand(
    part: Any, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With CHECK_OUTPUTS off other shapes are served, as by LibTorch, with one warning."""
    config = build.config(outputs=(build.spec("y", dtype, (2,)),), check_outputs=False)
    (verify,) = output_extraction.verifiers(config)

    for _ in range(2):
        made = verify(part, ROWS)
        assert list(made.shape) == list(np.array(part).shape)

    (message,) = caplog.messages
    assert "output 'y' is [3" in message
    assert "config.pbtxt says [-1, 2]" in message


@pytest.mark.parametrize(
    ("part", "reshaped"),
    [
        pytest.param(torch.rand(4, 16), False, id="rows"),
        pytest.param(torch.rand(3, 2).double(), False, id="type"),
        pytest.param(torch.tensor(1.0), False, id="no rows"),
        pytest.param(torch.rand(3, 16), True, id="reshape"),
    ],
)
def test_unservable_shapes_are_refused(part: Tensor, reshaped: bool) -> None:
    """A wrong number of rows, or a shape for Triton's reshape, is refused even then."""
    spec = dataclasses.replace(build.spec("y", dims=(2,)), reshaped=reshaped)
    (verify,) = output_extraction.verifiers(build.config(outputs=(spec,), check_outputs=False))

    with pytest.raises(OutputError):
        verify(part, ROWS)


@pytest.mark.parametrize(
    ("dims", "shape", "made"),
    [
        pytest.param((1,), (3,), (3, 1), id="[rows] for [-1, 1]"),
        pytest.param((1, 1), (3,), (3, 1, 1), id="[rows] for [-1, 1, 1]"),
    ],
)
def test_one_value_per_row_is_reshaped(
    dims: tuple[int, ...], shape: tuple[int, ...], made: tuple[int, ...]
) -> None:
    """One value for each row needs no dimension of 1."""
    part = torch.rand(shape)

    found = verified(part, dims=dims)

    assert isinstance(found, Tensor)
    assert found.shape == made
    assert found.flatten().tolist() == part.tolist()


@pytest.mark.parametrize(
    ("part", "dims", "overrides", "said"),
    [
        pytest.param(
            torch.ones(3, 5),
            (2,),
            {},
            "is float32 [3, 5]; expected float32 [-1, 2] as in config.pbtxt",
            id="size",
        ),
        pytest.param(
            torch.ones(3, 2, 1),
            (2,),
            {},
            "is float32 [3, 2, 1]; expected float32 [-1, 2]",
            id="rank",
        ),
        pytest.param(torch.ones(3), (2,), {}, "is float32 [3]; expected", id="row values for [2]"),
        pytest.param(
            torch.ones(3, 2, dtype=torch.float64),
            (2,),
            {},
            "is float64 [3, 2]; expected float32 [-1, 2]",
            id="type",
        ),
        pytest.param(torch.ones(4, 2), (2,), {}, "has 4 rows for a batch of 3", id="more rows"),
        pytest.param(torch.ones(4), (1,), {}, "has 4 rows for a batch of 3", id="more row values"),
    ],
)
def test_tensor_that_contradicts_the_config_is_refused(
    part: Tensor, dims: tuple[int, ...], overrides: dict[str, Any], said: str
) -> None:
    """Another type, shape or number of rows is an error that names both shapes."""
    assert said in refusal(part, dims=dims, **overrides)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (None, "NoneType"),
        ("text", "str"),
        ([1.0], "list"),
        ({"y": torch.ones(1)}, "dict"),
        (np.ones((3, 2), np.float32), "ndarray"),
        (1.0, "float"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_objects_are_refused(part: Any, kind: str) -> None:
    """Anything but a tensor is refused with its type; in a batch, so are numbers."""
    assert f"output 'y' is a {kind}; expected a torch.Tensor" in refusal(part)


# --- Python numbers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "dtype", "dims"),
    [
        pytest.param(2.5, "FP32", (), id="float"),
        pytest.param(2.5, "BF16", (1,), id="float for [1]"),
        pytest.param(7, "INT64", (1, 1), id="int for [1, 1]"),
        pytest.param(7, "FP32", (1,), id="int as FP32"),
        pytest.param(True, "BOOL", (1,), id="bool"),
    ],
)
def test_number_of_a_model_without_batches(part: float, dtype: str, dims: tuple[int, ...]) -> None:
    """Without a batch dimension a Python number becomes a tensor with one value."""
    found = verified(part, dtype, dims, max_batch_size=0)

    assert isinstance(found, Tensor)
    assert found.shape == dims
    assert found.dtype is getattr(torch, str(build.spec("y", dtype).dtype.torch))
    assert found.item() == part


@pytest.mark.parametrize(
    ("dtype", "number"), [("UINT64", 2**64 - 1), ("FP64", 2**70)], ids=["UINT64", "FP64"]
)
def test_large_number(dtype: str, number: int) -> None:
    """A number that fits in the output's type is served, even if it does not fit in int64."""
    found = verified(number, dtype, (1,), max_batch_size=0)

    assert isinstance(found, Tensor)
    assert found.item() == number


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        pytest.param(2.5, "INT64", id="float as integer"),
        pytest.param(2.5, "BOOL", id="float as bool"),
        pytest.param(300, "UINT8", id="too large"),
        pytest.param(-1, "UINT8", id="negative"),
    ],
)
def test_number_that_its_type_cannot_hold_is_refused(part: float, dtype: str) -> None:
    """A number that would change its value is an error of the output."""
    refusal(part, dtype, (1,), max_batch_size=0)


# --- special tensors --------------------------------------------------------------------------

_FLAT = torch.ones(3, 2)
_ODD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (_FLAT.to_sparse, "a tensor of layout sparse_coo, float32 [3, 2]"),
    "sparse rows": (_FLAT.to_sparse_csr, "a tensor of layout sparse_csr, float32 [3, 2]"),
    "meta": (lambda: _FLAT.to("meta"), "a tensor on the device meta, float32 [3, 2]"),
    "complex": (lambda: _FLAT.to(torch.complex64), "complex64 [3, 2]"),
    "quantised": (
        lambda: torch.quantize_per_tensor(_FLAT, 0.1, 0, torch.quint8),
        "quint8 [3, 2]",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([_FLAT, _FLAT]).double(),
        "a nested tensor of float64",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("make", "form"), _ODD.values(), ids=_ODD)
@pytest.mark.parametrize("cast", [False, True])
def test_tensors_that_cannot_be_sent(make: Callable[[], Tensor], form: str, cast: bool) -> None:
    """A tensor without dense values is refused with its layout, and is not cast."""
    assert f"is {form}" in refusal(make(), cast_outputs=cast)


@pytest.mark.parametrize("cast", [False, True])
def test_eight_bits_are_refused_or_cast(cast: bool) -> None:
    """Triton has no float8; CAST_OUTPUTS converts it to the config's type."""
    part = _FLAT.to(torch.float8_e4m3fn)
    if not cast:
        assert "is float8_e4m3fn [3, 2]" in refusal(part)
        return

    found = verified(part, cast_outputs=True)

    assert isinstance(found, Tensor)
    assert torch.equal(found, _FLAT)


def test_finite() -> None:
    """Only types with NaN are checked, and the error names the first such output."""
    specs = (build.spec("n", "INT64"), build.spec("a"), build.spec("b"), build.spec("s", "BYTES"))
    made = output_extraction.Finite(build.config(outputs=specs))
    words = np.array([["a"]], dtype=np.object_)
    good, bad = torch.ones(1, 1), torch.tensor([[torch.inf]])
    whole: list[Value] = [torch.ones(1, 1, dtype=torch.int64), good, bad, words]

    assert not made.holds(whole)
    assert made.holds([*whole[:2], good, words])
    assert made.refusal({"n": whole[0], "a": good, "b": good, "s": words}) is None
    assert "output 'b' holds NaN or infinity" in str(
        made.refusal({"n": whole[0], "a": good, "b": bad, "s": words})
    )


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(torch.arange(6.0).reshape(2, 3).t(), id="transposed"),
        pytest.param(torch.arange(2.0).expand(3, -1), id="expanded"),
        pytest.param(torch.arange(12.0).reshape(3, 4)[:, ::2], id="every other"),
        pytest.param(torch.arange(3.0)[:, None].expand(-1, 2), id="expanded columns"),
        pytest.param(torch.view_as_complex(torch.rand(3, 2, 2)).conj().imag, id="negated later"),
        pytest.param(torch.ones(3, 2, requires_grad=True), id="requires a gradient"),
        pytest.param(torch.ones(3, 2, requires_grad=True) * 2, id="has a history"),
        pytest.param(nn.Parameter(torch.ones(3, 2)), id="parameter"),
    ],
)
def test_memory_is_what_triton_reads(part: Tensor) -> None:
    """An output is contiguous, resolved and detached, whatever the tensor's layout."""
    found = verified(part)

    assert isinstance(found, Tensor)
    assert found.is_contiguous()
    assert not found.requires_grad
    assert not found.is_neg()
    assert found.numpy().tolist() == part.detach().resolve_neg().tolist()


# --- CAST_OUTPUTS ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "dtype", "values"),
    [
        pytest.param(torch.tensor([[1.5, 2.5]]).double(), "FP32", [[1.5, 2.5]], id="narrower"),
        pytest.param(torch.tensor([[1.5, 2.5]]).bfloat16(), "FP32", [[1.5, 2.5]], id="wider"),
        pytest.param(torch.tensor([[1, 2]]), "FP16", [[1.0, 2.0]], id="integers"),
        pytest.param(torch.tensor([[1, 0]]), "BOOL", [[True, False]], id="bool"),
        pytest.param(torch.tensor([[1.0, 2.0]]), "FP32", [[1.0, 2.0]], id="already"),
    ],
)
def test_outputs_are_cast_on_demand(part: Tensor, dtype: str, values: Any) -> None:
    """Only CAST_OUTPUTS converts a result to the config's type."""
    found = verified(part, dtype, rows=1, cast_outputs=True)

    assert isinstance(found, Tensor)
    assert found.dtype is getattr(torch, str(build.spec("y", dtype).dtype.torch))
    assert found.tolist() == values


# --- strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "dims", "made"),
    [
        pytest.param(["a", "b", "c"], (), ["a", "b", "c"], id="rows alone"),
        pytest.param(["a", "b", "c"], (1,), [["a"], ["b"], ["c"]], id="one a row"),
        pytest.param(("a", "b", "c"), (1,), [["a"], ["b"], ["c"]], id="tuple"),
        pytest.param(list("abcdef"), (2,), [["a", "b"], ["c", "d"], ["e", "f"]], id="flat"),
        pytest.param(list("abcdef"), (-1,), [["a", "b"], ["c", "d"], ["e", "f"]], id="flat for -1"),
        pytest.param([["a", "b"]] * 3, (2,), [["a", "b"]] * 3, id="nested"),
        pytest.param([["a", "b"]] * 3, (-1,), [["a", "b"]] * 3, id="nested for -1"),
        pytest.param([[["a"], ["b"]]] * 3, (-1, -1), [[["a"], ["b"]]] * 3, id="three dimensions"),
        pytest.param([b"\xff", "ä", b""], (), [b"\xff", "ä", b""], id="bytes and text"),
        pytest.param(np.array(["a", "b", "c"]), (1,), [["a"], ["b"], ["c"]], id="numpy's text"),
        pytest.param(np.array([b"a", b"b", b"c"]), (), [b"a", b"b", b"c"], id="numpy's bytes"),
        pytest.param(
            np.array([["a"]] * 3, dtype=np.object_), (1,), [["a"]] * 3, id="numpy's objects"
        ),
    ],
)
def test_strings_of_any_shape(part: Any, dims: tuple[int, ...], made: Any) -> None:
    """Strings in flat or nested lists, or in an array, get the config's shape."""
    assert strings(verified(part, "BYTES", dims)) == made


@pytest.mark.parametrize(
    ("part", "dims", "overrides", "said"),
    [
        pytest.param(
            ["a", "b"], (1,), {}, "is strings [2]; expected strings [-1, 1] as in", id="too few"
        ),
        pytest.param(["a"] * 4, (), {}, "has 4 rows for a batch of 3", id="too many rows"),
        pytest.param([["a"]] * 4, (1,), {}, "has 4 rows for a batch of 3", id="nested, too many"),
        pytest.param([["a"]] * 3, (2,), {}, "is strings [3, 1]; expected", id="nested, too short"),
        pytest.param(list("abcd"), (-1,), {}, "is strings [4]; expected", id="no whole rows"),
        pytest.param(list("abc"), (-1, -1), {}, "is strings [3]; expected", id="ambiguous"),
        pytest.param(
            "abc", (1,), {}, "is strings []; expected strings [-1, 1]", id="one of a batch"
        ),
        pytest.param(
            ["a"],
            (2,),
            {"max_batch_size": 0},
            "is strings [1]; expected strings [2]",
            id="unbatched",
        ),
        pytest.param(
            [["a"], ["b", "c"]],
            (-1,),
            {},
            "is a list; expected a list of str or bytes",
            id="ragged",
        ),
        pytest.param(
            ["a", None, "c"], (), {}, "is a list; expected a list of str", id="None in it"
        ),
        pytest.param([1, 2, 3], (), {}, "is a list; expected a list of str", id="numbers"),
        pytest.param(torch.ones(3), (), {}, "is a Tensor; expected a list of str", id="tensor"),
        pytest.param(None, (), {}, "is a NoneType; expected a list of str", id="None"),
        pytest.param(
            np.ones(3), (), {}, "is a ndarray; expected a list of str", id="numpy numbers"
        ),
        pytest.param({"a"}, (), {}, "is a set; expected a list of str", id="set"),
    ],
)
def test_strings_that_contradict_the_config_are_refused(
    part: Any, dims: tuple[int, ...], overrides: dict[str, Any], said: str
) -> None:
    """Another shape, number of rows or type of value is refused."""
    assert said in refusal(part, "BYTES", dims, **overrides)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param([["a"], [["b"]], "c"], id="of different depth"),
        pytest.param([[["a", "b"], ["c", "d"]], ["e", "f"]], id="of different depth, inside"),
        pytest.param([[], ["a"], []], id="some empty"),
    ],
)
def test_ragged_strings_are_refused(part: Any) -> None:
    """Lists of different lengths are an error of this output."""
    refusal(part, "BYTES", (-1,))


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(np.array(["a", None, "c"], dtype=np.object_), id="None in an array"),
        pytest.param(["a", "\udcff", "c"], id="half of a character"),
    ],
)
def test_strings_that_cannot_be_sent_are_refused(part: Any) -> None:
    """A string that cannot be encoded would fail the whole batch when it is written."""
    refusal(part, "BYTES", ())


# --- outputs without a config ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "dtype", "shape"),
    [
        pytest.param(torch.ones(2, 3, requires_grad=True), torch.float32, (2, 3), id="tensor"),
        pytest.param(3, torch.int64, (), id="int"),
        pytest.param(2.5, torch.float32, (), id="float"),
        pytest.param(True, torch.bool, (), id="bool"),
    ],
)
def test_plain_part(part: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A tensor stays as it is, and a number becomes a tensor."""
    found = output_extraction.plain("digits", "y", part)

    assert isinstance(found, Tensor)
    assert (found.dtype, found.shape, found.requires_grad) == (dtype, shape, False)
