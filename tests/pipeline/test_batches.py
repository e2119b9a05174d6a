from __future__ import annotations

from typing import Any

import build
import pytest
import torch
from engines import texts
from torch import Tensor

from torch_py_backend import values
from torch_py_backend.errors import ConfigError
from torch_py_backend.pipeline import batches
from torch_py_backend.pipeline.run import Counts
from torch_py_backend.values import ANY_ROWS, Rows, Value


@pytest.mark.parametrize(
    ("total", "rows", "calls"),
    [
        pytest.param(5, Rows(4, 4), [[0, 1, 2, 3], [4, 4, 4, 4]], id="the last filled up"),
        pytest.param(1, Rows(2, None), [[0, 0]], id="at least two"),
        pytest.param(5, Rows(2, 4, (2, 4)), [[0, 1, 2, 3], [4, 4]], id="two buckets"),
        pytest.param(0, Rows(4, 4), [[]], id="no rows"),
    ],
)
def test_columns_are_fitted_to_the_rows_of_a_program(
    total: int, rows: Rows, calls: list[list[int]]
) -> None:
    received = []

    def call(numbers: Tensor, strings: Any) -> list[Value]:
        assert strings.tolist() == [str(number) for number in numbers.tolist()]
        received.append(numbers.tolist())
        return [numbers]

    fill = batches.filled(rows, lambda result, _: result, values.clone, counts := Counts())
    columns: list[Value] = [torch.arange(total), texts(*map(str, range(total)))]
    assert fill(call, columns, total)[0].tolist() == list(range(total))
    assert received == calls
    assert counts.rows == counts.filled_rows == sum(map(len, calls)) - total


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
    config = build.config(max_batch_size=most, batch_buckets=wished)
    assert batches.row_counts(config, takes, fixed=fixed) == expected


def test_buckets_that_the_model_does_not_take_are_refused() -> None:
    config = build.config(batch_buckets=(1, 2))
    with pytest.raises(ConfigError, match=r"BATCH_BUCKETS is 1, 2; expected .* 4 to 8"):
        batches.row_counts(config, Rows(4, 8), fixed=False)
