"""Two thousand malformed requests: no crash, no hang, no error of ours that is not the client's.

They arrive together with good requests for the same models, which batches put beside them.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterator
from typing import Any

import hostile
import living
import malformed
import numpy as np
import pytest
import serving
from hostile import SERVED, Answer, Grpc, Http
from malformed import Malformed

from torch_py_backend.server import Server

_SEED = 20_260_101
_WAVES = 100
_BAD_PER_WAVE = 20  # with _WAVES: 2,000
_GOOD_PER_WAVE = 8
# Triton itself refuses a whole batch in which the lengths of one request's strings are wrong.
_STRINGS = "incomplete string"
# gRPC's names of what HTTP calls 5xx.
_FAULTS = {"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("malformed")
    for served in SERVED:
        served.scenario.lay_out(folder / "repository")
    with serving.running(folder) as server:
        yield server


def test_malformed_requests(server: Server) -> None:
    """Each gets an answer; the good ones among them are right; every process lives on."""
    started = {one.pid for one in living.descendants(server.process.pid)}
    answers = asyncio.run(_storm(server))

    assert sum(answers.values()) == _WAVES * _BAD_PER_WAVE
    faults = {key: count for key, count in answers.items() if _is_fault(key[0])}
    ours = {key: count for key, count in faults.items() if _is_ours(key[1])}
    assert not ours
    assert not [key for key in answers if "/tmp" in key[1] or "Traceback" in key[1]]
    # Most are refused; a few changes leave a request as good as it was.
    refused = sum(count for (status, _), count in answers.items() if status not in (200, "OK"))
    assert refused > _WAVES * _BAD_PER_WAVE / 2
    now = {one.pid for one in living.descendants(server.process.pid)}
    assert started <= now


def _is_fault(status: int | str) -> bool:
    return status in _FAULTS or (isinstance(status, int) and status >= 500)


def _is_ours(text: str) -> bool:
    """Whether a message is of our making, or tells of what went wrong in our process."""
    return any(part in text for part in ("model '", "Traceback", ".py", "Stub process", "Error:"))


async def _storm(server: Server) -> collections.Counter[tuple[int | str, str]]:
    random = np.random.default_rng(_SEED)
    answers: collections.Counter[tuple[int | str, str]] = collections.Counter()
    https = [Http(server.http_address) for _ in range(_BAD_PER_WAVE + _GOOD_PER_WAVE)]
    grpcs = [Grpc(server.grpc_address) for _ in range(4)]
    try:
        for wave in range(_WAVES):
            served = SERVED[wave % len(SERVED)]
            over_grpc = bool(wave // len(SERVED) % 2)
            make = malformed.grpc if over_grpc else malformed.http
            bad = [make(served, random) for _ in range(_BAD_PER_WAVE)]
            good = [served.call(random) for _ in range(_GOOD_PER_WAVE)]
            sent = [
                _send(grpcs[number % len(grpcs)] if over_grpc else https[number], one)
                for number, one in enumerate(bad)
            ]
            clients: list[Any] = grpcs if wave % 2 else https[_BAD_PER_WAVE:]
            asked = [
                clients[number % len(clients)].infer(served.name, call.inputs)
                for number, call in enumerate(good)
            ]
            came = await asyncio.gather(*sent, *asked)
            for number, call in enumerate(good):
                answer = came[_BAD_PER_WAVE + number]
                if _STRINGS in answer.text:  # another's; what matters is that it is over
                    answer = await clients[number % len(clients)].infer(served.name, call.inputs)
                assert hostile.right(call, answer), (served.name, wave, call, answer)
            answers.update((one.status, one.text) for one in came[:_BAD_PER_WAVE])
            assert server.process.poll() is None, f"the server died in wave {wave}"
    finally:
        await asyncio.gather(*(client.close() for client in https))
        await asyncio.gather(*(client.close() for client in grpcs))
    return answers


async def _send(client: Http | Grpc, bad: Malformed) -> Answer:
    try:
        if isinstance(client, Grpc):
            return await client.send(bad.request, bad.method)
        return await client.send(bad.request, ends=bad.ends)
    except (TimeoutError, asyncio.TimeoutError):  # one and the same from 3.11 on
        raise AssertionError(f"no answer to {bad.what}: {bad.request[:3000]!r}") from None
