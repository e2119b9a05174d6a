"""Real servers for the tests in this folder; every test here is marked `server`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import TABLES, Serving, asked

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="module")
def serving(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """A server with the table of scenarios that the test names."""
    folder = tmp_path_factory.mktemp("serving")
    for scenario in TABLES[request.param]:
        scenario.lay_out(folder / "repository")
    with asked(folder) as running:
        yield running
