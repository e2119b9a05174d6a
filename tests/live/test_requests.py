"""Requests that Triton itself refuses never reach a model; the next good one is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from serving import Serving
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.parametrize("serving", ["function"], indirect=True, scope="module")
_GOOD = {"x": np.ones((2, 4), dtype=np.float32)}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"x": np.ones((2, 4), dtype=np.int64)}, "data-type"),
        ({"x": np.ones((2, 5), dtype=np.float32)}, "shape"),
        ({"x": np.ones((9, 4), dtype=np.float32)}, "batch-size must be <= 8"),
        ({"y": np.ones((2, 4), dtype=np.float32)}, "'y'"),
        ({}, "expected 1 inputs but got 0"),
    ],
    ids=["dtype", "shape", "rows", "name", "none"],
)
def test_refused_by_triton(
    inputs: dict[str, Any], says: str, protocol: str, serving: Serving
) -> None:
    """A wrong dtype, shape, row count or name gets a sentence that says so."""
    with pytest.raises(InferenceServerException) as refusal:
        serving.infer(protocol, "function", inputs, ["y"])
    assert says in refusal.value.message()
    result = serving.infer(protocol, "function", _GOOD, ["y"])
    np.testing.assert_array_equal(result.as_numpy("y"), 2 * _GOOD["x"])


def test_unknown_output(serving: Serving) -> None:
    """An output that the model does not have is refused."""
    with pytest.raises(InferenceServerException, match="unexpected inference output 'z'"):
        serving.infer("http", "function", _GOOD, ["z"])
