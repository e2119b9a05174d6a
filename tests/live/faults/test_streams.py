"""`serve` and streams: a step that hangs, and an end in mid-stream, on real servers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import living
import pytest
import scenarios
import streamed
from grpc_streams import Client, responses
from scenarios import Scenario
from supervised import Supervised, serve, until

pytestmark = pytest.mark.slow

_ENDLESS = """
import time


def forward(x):
    while True:
        while float(x) == 103:
            pass
        time.sleep(0.005)
        yield x
"""
_CONFIG = streamed.config({"x": "FP32"}, {"y": "FP32"})
_LIMIT = 'parameters { key: "EXECUTION_TIMEOUT_MS" value { string_value: "3000" } }\n'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    repository = tmp_path_factory.mktemp("streams")
    Scenario("endless", scenarios.text(_ENDLESS), _CONFIG + _LIMIT).lay_out(repository)
    with serve(repository) as supervised:
        supervised.wait_loaded()
        yield supervised


def _ask(client: Client, value: float) -> Any:
    return client.ask("endless", {"x": streamed.floats(value)})


def _responses(call: Any, count: int) -> int:
    return len(list(itertools.islice(responses(call), count)))


def test_a_step_that_hangs(served: Supervised) -> None:
    """A step that takes longer than the limit costs the instance; streams of many steps do not."""
    with grpc.insecure_channel(served.grpc) as channel:
        client = Client(channel)
        living = _ask(client, 1)
        # More than the limit, all in all.
        assert _responses(living, 700) == 700
        hangs = _ask(client, 103)
        until(lambda: "serves again" in served.text, served)
        assert "a call took longer than EXECUTION_TIMEOUT_MS" in served.text
        assert _responses(_ask(client, 2), 5) == 5
        # Triton never ends the streams of a process that has died.
        for call in (living, hangs):
            call.cancel()


def test_the_end_of_the_server(served: Supervised) -> None:
    """A server that is told to end in mid-stream ends, and leaves nothing."""
    with grpc.insecure_channel(served.grpc) as channel:
        assert _responses(_ask(Client(channel), 1), 5) == 5
        family = served.family()
        served.end()
        assert served.process.returncode == 0
        assert living.all_end(family)
