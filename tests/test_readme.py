"""What the README says of parameters is what the code does."""

from __future__ import annotations

import readme


def test_table_of_parameters() -> None:
    """Every parameter, its values, default and meaning; `python tests/readme.py` writes it."""
    assert readme.table_in_readme() == readme.table()
