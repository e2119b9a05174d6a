"""The page of tried versions."""

from __future__ import annotations

import compatibility
import kinds
import pytest
import scenarios

_PAGE = compatibility.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("table", ["servers", "tests"])
def test_tables(table: str) -> None:
    """Each table has rows, and each row a value in every column."""
    rows = compatibility.rows(_PAGE, table)
    assert rows
    assert all(len(row) == 5 and all(row) for row in rows)


def test_models_that_are_tried() -> None:
    """The script's models are rows of the tables."""
    known = {one.name for one in (*scenarios.TABLE, *kinds.TABLE) if not one.load_error}
    assert set(compatibility.SCENARIOS) <= known
