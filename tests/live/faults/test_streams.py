"""`serve` and streams: a step that hangs, and an end in mid-stream, on real servers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import grpc
import living
import pytest
import scenarios
import streamed
from grpc_streams import Client, responses
from scenarios import Scenario
from supervised import serve, until

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


def _ask(client: Client, value: float) -> Any:
    return client.ask("endless", {"x": streamed.floats(value)})


def _responses(call: Any, count: int) -> int:
    return len(list(itertools.islice(responses(call), count)))


def test_streams(tmp_path: Path) -> None:
    """A step that takes longer than the limit costs the instance; streams of many steps do not.

    A server that is told to end in mid-stream ends, and leaves nothing.
    """
    Scenario("endless", scenarios.text(_ENDLESS), _CONFIG + _LIMIT).lay_out(tmp_path)
    with serve(tmp_path) as served:
        served.wait_loaded()
        with grpc.insecure_channel(served.grpc) as channel:
            client = Client(channel)
            healthy = _ask(client, 1)
            # More than the limit, all in all.
            assert _responses(healthy, 700) == 700
            hangs = _ask(client, 103)
            until(lambda: "serves again" in served.text, served)
            assert "a call took longer than EXECUTION_TIMEOUT_MS" in served.text
            # Triton never ends the streams of a process that has died.
            for call in (healthy, hangs):
                call.cancel()
            assert _responses(_ask(client, 2), 5) == 5
            family = served.family()
            served.end()
            assert served.process.returncode == 0
            assert living.all_end(family)
