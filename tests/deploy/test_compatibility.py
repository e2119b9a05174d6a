"""The page of tried versions, and what writes it."""

from __future__ import annotations

import compatibility
import kinds
import pytest
import scenarios

_PAGE = compatibility.PAGE.read_text(encoding="utf-8")
_EMPTY = (
    "before\n<!-- servers: x -->\n| a | b | c |\n|---|---|---|\n<!-- end of servers -->\nafter\n"
)


@pytest.mark.parametrize(("table", "cells"), [("servers", 5), ("tests", 5)])
def test_tables(table: str, cells: int) -> None:
    """Each has rows, all of its columns, and this machine's versions are no secret of theirs."""
    rows = compatibility.rows(_PAGE, table)
    assert rows
    assert all(len(row) == cells and all(row) for row in rows)


def test_row_takes_the_place_of_an_older_one() -> None:
    """A row with the same versions is replaced, others stay; what is around the table, too."""
    page = compatibility.written(_EMPTY, "servers", ["2.51.0", "3.11", "bad"], 2)
    page = compatibility.written(page, "servers", ["2.44.0", "3.11", "good"], 2)
    page = compatibility.written(page, "servers", ["2.51.0", "3.11", "good"], 2)
    assert compatibility.rows(page, "servers") == [
        ["2.51.0", "3.11", "good"],
        ["2.44.0", "3.11", "good"],
    ]
    assert page.startswith("before\n<!-- servers: x -->\n| a | b | c |\n|---|")
    assert page.endswith("|\n<!-- end of servers -->\nafter\n")


def test_models_that_are_tried() -> None:
    """The script's models are rows of the tables."""
    known = {one.name for one in (*scenarios.TABLE, *kinds.TABLE) if not one.load_error}
    assert set(compatibility.SCENARIOS) <= known


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.42.0", "2.42.0 (24.01)"),
        ("2.51.0", "2.51.0 (24.10)"),
        ("2.53.0", "2.53.0 (24.12)"),
        ("2.54.0", "2.54.0 (25.01)"),
        ("2.59.0", "2.59.0 (25.06)"),
        ("2.60.0", "2.60.0 (25.08)"),
        ("2.64.0", "2.64.0 (25.12)"),
        ("2.65.0", "2.65.0 (26.01)"),
        ("2.72.0", "2.72.0 (26.08)"),
        ("2.77.0", "2.77.0"),
        ("2.41.0", "2.41.0"),
    ],
)
def test_release(version: str, release: str) -> None:
    """A server tells its own version; NVIDIA's releases are named by month."""
    assert compatibility._release(version) == release


def test_modules_without_torch() -> None:
    """Tests that need no torch are those whose imports, direct and indirect, import none."""
    chosen = compatibility.without_torch()
    assert {"tests/config/test_options.py", "tests/processes/test_private_files.py"} <= set(chosen)
    assert not {"tests/engine/test_engine.py", "tests/test_scenarios.py"} & set(chosen)
