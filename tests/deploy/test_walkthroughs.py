"""The pages of the documentation that serve a model, followed with a real server."""

from __future__ import annotations

from pathlib import Path

import documentation
import pytest
import walkthrough

pytestmark = pytest.mark.server

_PAGES = [page for page in documentation.PAGES if walkthrough.serves(page)]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_page(page: Path, tmp_path: Path) -> None:
    """A page, followed in an empty folder, ends with the answers that it promises."""
    walkthrough.follow(page, tmp_path)
