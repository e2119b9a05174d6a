"""`torch_py_backend.serve`: answers of a real server, and what is left behind.

The pages that tests/deploy follows serve what `save_model` has written.
"""

from __future__ import annotations

import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import instances
import living
import models
import numpy as np
import pytest
import scenarios
import streamed
import torch
from children import starting, until
from tritonclient.utils import InferenceServerException

import torch_py_backend
from torch_py_backend import LocalServer
from torch_py_backend.errors import InputError, ToolError

_HALVES = scenarios.Scenario(
    "half",
    scenarios.python(models.Times),
    scenarios.config({}, {})
    + scenarios.tensor("input", "x", [4], "BF16")
    + scenarios.tensor("input", "factor", [4], "BF16")
    + scenarios.tensor("output", "y", [4], "BF16"),
)
_LARGE = "import torch\n\n\ndef large(x):\n    return {'y': torch.zeros(len(x), 2**21)}\n"
_LARGER = scenarios.Scenario("large", scenarios.text(_LARGE), scenarios.x_to_y(2**21))
# Ticks as often as it is asked to.
_TICKER = streamed.TABLE[0].scenario


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    repository = tmp_path_factory.mktemp("models")
    for scenario in (instances.named("module_pt"), _HALVES, _LARGER, _TICKER):
        scenario.lay_out(repository)
    running = torch_py_backend.serve(repository)
    try:
        running.start()
    except ToolError as error:
        # tritonserver 24.10 rarely dies of boost's lock_exception while instances load.
        if "ended by SIGABRT" not in str(error):
            raise
        running.start()
    yield running
    running.stop()


def test_what_is_served_answers_as_the_module(server: LocalServer) -> None:
    for rows in (1, 2, 5):
        x = torch.rand(rows, 4)
        for inputs in (x, {"x": x}, x.numpy().astype(np.float64), x.tolist()):
            outputs = server.infer("module_pt", inputs)
            assert outputs.keys() == {"y"}
            scenarios.assert_close(outputs["y"], 6 * x.numpy())


def test_messages_have_no_limit(server: LocalServer) -> None:
    assert server.infer("large", torch.rand(1, 4))["y"].nbytes == 2**23


def test_values_that_numpy_does_not_have(server: LocalServer) -> None:
    x = torch.rand(2, 4).bfloat16().float()
    outputs = server.infer("half", {"x": x, "factor": torch.full_like(x, 2.0)})
    assert torch.equal(torch.from_numpy(outputs["y"].astype(np.float32)), x * 2)


def test_stream(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each response is a dict of arrays; a stream may be left. No proxy is used."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delattr(server, "client", raising=False)
    rows = [outputs["y"].tolist() for outputs in server.stream("ticker", [3])]
    assert rows == [[0.0], [1.0], [2.0]]
    assert next(server.stream("ticker", [4]))["y"].tolist() == [0.0]
    with pytest.raises(InferenceServerException, match="unexpected shape"):
        next(server.stream("ticker", [[1]]))


def test_client(server: LocalServer) -> None:
    """The server has a client of tritonclient and addresses."""
    assert server.url == f"http://{server.http_address}"
    assert server.http_address in repr(server)
    assert f'<a href="{server.page_url}"' in server._repr_html_()
    with urllib.request.urlopen(server.page_url) as response:
        assert b"page.js" in response.read()
    assert server.client.is_model_ready("module_pt")
    assert server.client.get_server_metadata().name == "triton"
    for address in (server.http_address, server.grpc_address, server.metrics_address):
        host, _, port = address.partition(":")
        socket.create_connection((host, int(port)), timeout=60).close()


def test_values_that_do_not_fit_are_refused(server: LocalServer) -> None:
    with pytest.raises(InputError, match="expected a dict of values by the names x, factor"):
        server.infer("half", [[1.0]])
    with pytest.raises(InferenceServerException, match="unexpected shape for input 'x'"):
        server.infer("module_pt", [[1.0, 2.0]])


# A process that a shell started in the background ignores Ctrl-C, and so do its children.
_SCRIPT = """
import signal
import sys
import torch_py_backend
signal.signal(signal.SIGINT, signal.default_int_handler)
with torch_py_backend.serve(sys.argv[1]):
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("number", "processes"),
    [
        pytest.param(signal.SIGINT, 2, id="SIGINT with an instance"),
        pytest.param(signal.SIGKILL, 1, id="SIGKILL with a tritonserver"),
    ],
)
def test_the_end_of_the_process_ends_the_server(
    number: signal.Signals, processes: int, tmp_path: Path
) -> None:
    """Ctrl-C and a death do, however far it has started; no file is left after Ctrl-C."""
    instances.named("function").lay_out(tmp_path / "models")
    (tmp_path / "temporary").mkdir()
    with starting(tmp_path / "temporary") as start:
        process = start(_SCRIPT, tmp_path / "models").process
        try:
            until(lambda: len(living.descendants(process.pid)) >= processes)
            family = living.descendants(process.pid)
            process.send_signal(number)
            assert process.wait(120) == -number
            living.wait(family)
        finally:
            living.kill(process)
    if number is signal.SIGINT:
        assert list((tmp_path / "temporary").iterdir()) == []
