"""Real servers for the tests in this folder; every test here is marked `server`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc
import tritonclient.http
from serving import TABLES, Serving

from torch_py_backend.server import Server

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
    table = TABLES[request.param]
    folder = tmp_path_factory.mktemp("serving")
    repository = folder / "repository"
    for scenario in table:
        scenario.lay_out(repository)
    log_path = folder / "server.log"
    with (
        log_path.open("wb") as log,
        Server(repository, http_port=0, grpc_port=0, metrics_port=0, log=log) as server,
    ):
        states = {state.name: state for state in server.wait_loaded(timeout=540)}
        http = tritonclient.http.InferenceServerClient(server.http_address)
        grpc = tritonclient.grpc.InferenceServerClient(server.grpc_address)
        yield Serving(server, states, http, grpc, log_path)
        http.close()
        grpc.close()
