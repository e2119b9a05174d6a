"""The row counts of a model's calls."""

from __future__ import annotations

import build
import pytest

from torch_py_backend.errors import ConfigError
from torch_py_backend.pipeline import batches
from torch_py_backend.values import ANY_ROWS, Rows


@pytest.mark.parametrize(
    ("most", "takes", "fixed", "wished", "expected"),
    [
        pytest.param(0, ANY_ROWS, True, None, ANY_ROWS, id="no batches"),
        pytest.param(8, ANY_ROWS, False, None, Rows(1, 8), id="at most max_batch_size"),
        pytest.param(8, ANY_ROWS, True, None, Rows(1, 8, (1, 2, 4, 8)), id="fixed shapes"),
        pytest.param(6, ANY_ROWS, True, None, Rows(1, 6, (1, 2, 4, 6)), id="no power of two"),
        pytest.param(8, ANY_ROWS, False, (2, 8), Rows(2, 8, (2, 8)), id="a list"),
        pytest.param(8, Rows(4, 4), False, None, Rows(4, 4), id="a program's fixed batch"),
        pytest.param(2, Rows(4, 4), True, None, Rows(4, 4, (4,)), id="above max_batch_size"),
        pytest.param(8, Rows(2, None), False, None, Rows(2, 8), id="at least two"),
        pytest.param(8, Rows(2, 6), False, (1, 4, 8), Rows(4, 4, (4,)), id="only what it takes"),
    ],
)
def test_rows_of_a_call(
    most: int, takes: Rows, fixed: bool, wished: tuple[int, ...] | None, expected: Rows
) -> None:
    """The model's limits, max_batch_size and the buckets are combined."""
    config = build.config(max_batch_size=most, batch_buckets=wished)
    assert batches.row_counts(config, takes, fixed=fixed) == expected


def test_unusable_buckets() -> None:
    """Buckets that the model does not accept are refused with its limits."""
    config = build.config(max_batch_size=8, batch_buckets=(1, 2))
    with pytest.raises(ConfigError, match=r"BATCH_BUCKETS is 1, 2; expected .* 4 to 8"):
        batches.row_counts(config, Rows(4, 8), fixed=False)
