"""`serve` under full load, with cancellations, loads and unloads, and instances that are killed.

Every answer is right or a clear error, nothing grows, and what was killed is back. The short form
runs with the tests; `make soak` (SOAK_SECONDS) takes twenty minutes.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import statistics
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import living
import numpy as np
import psutil
import pytest
import scenarios
import serving
import supervised
import tritonclient.grpc.aio
import tritonclient.http.aio
from scenarios import Scenario
from supervised import Supervised
from tritonclient.utils import InferenceServerException

_SECONDS = float(os.environ.get("SOAK_SECONDS", "5"))
_CLIENTS = 6  # of each protocol
_SAMPLE_S = 0.5
# Before each unload and load, and before each kill.
_PAUSE_S = 3.0
_CANCELLED = 0.03
# The slowest that may be under way at the end: a load.
_GRACE_S = 240.0
# What a model may say while it is taken away.
_CLEAR = (
    "is not ready",  # Triton: unloading, or not loaded yet
    "unknown model",
    "is not found",
    "unloaded",
    "no available versions",
    # Triton: of requests that an instance took with it.
    "is not healthy",
    "Failed to process the request",
)
# For each quantity, the factor and the sum by which it may grow: what allocators keep of a burst;
# a connection that is opened anew; the regions of instances that are loaded again at that moment.
_GROWTH = {"MiB": (1.08, 16), "files": (1, 2 * _CLIENTS), "regions": (1, 6), "shared": (1.08, 4)}
Sample: TypeAlias = dict[tuple[str, int], float]
Outcomes: TypeAlias = dict[str, collections.Counter[str]]


_AFFINE = scenarios.affine()


def _affine_of(name: str, instances: int) -> Scenario:
    more = "dynamic_batching { max_queue_delay_microseconds: 500 }\n"
    more += f"instance_group [{{ kind: KIND_CPU count: {instances} }}]\n"
    config = scenarios.config({"x": [4]}, {"y": [3]}, more=more)
    return Scenario(name, scenarios.affine_files(), config)


_STEADY = "steady"
_MODELS = (_affine_of(_STEADY, 2), _affine_of("reloaded", 1), _affine_of("killed", 1))


@pytest.mark.slow
def test_soak(tmp_path: Path) -> None:
    """Nothing is answered wrongly, or kept for longer than it is needed."""
    for model in _MODELS:
        model.lay_out(tmp_path / "repository")
    with supervised.serve(tmp_path / "repository", "--restarts=1000") as server:
        server.wait_loaded()
        outcomes, samples, reloads, kills = asyncio.run(_soak(server))
    for name, counts in outcomes.items():
        print(f"{name}: {counts}")
        refusals = counts.keys() - {"right", "cancelled"}
        assert counts["right"]
        assert all(any(part in text for part in _CLEAR) for text in refusals), refusals
        assert not (refusals and name == _STEADY)  # nothing touched it
    print(f"unloads and loads: {reloads}; kills: {kills}")
    assert reloads
    assert kills
    _assert_flat(samples)


async def _soak(server: Supervised) -> tuple[Outcomes, list[Sample], int, int]:
    outcomes: Outcomes = {model.name: collections.Counter() for model in _MODELS}
    samples: list[Sample] = []
    over = asyncio.Event()
    watched = [psutil.Process(server.process.pid), server.triton(), *server.stubs(_STEADY)]

    def look() -> None:
        samples.append(_look(watched, server.prefix()))

    tasks: list[Coroutine[Any, Any, Any]] = [
        _every(_PAUSE_S, over, lambda: _reload(server, "reloaded")),
        _every(_PAUSE_S, over, lambda: _kill(server, "killed")),
        _every(_SAMPLE_S, over, look),
        *(_ask(number, server, outcomes, over) for number in range(2 * _CLIENTS)),
    ]
    running = [asyncio.create_task(task) for task in tasks]
    # Whichever fails ends it for all.
    await asyncio.wait(running, timeout=_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
    over.set()
    _, hanging = await asyncio.wait(running, timeout=_GRACE_S)
    assert not hanging, [str(task.get_stack()[-1:]) for task in hanging]
    reloads, kills, *_ = await asyncio.gather(*running)
    return outcomes, samples, reloads, kills


async def _ask(number: int, server: Supervised, outcomes: Outcomes, over: asyncio.Event) -> None:
    """Send requests one after another, half of the clients over HTTP."""
    random = np.random.default_rng(number)
    module: Any = (tritonclient.http, tritonclient.grpc)[number % 2]
    client = module.aio.InferenceServerClient((server.http, server.grpc)[number % 2])
    while not over.is_set():
        name = _MODELS[int(random.integers(len(_MODELS)))].name
        x = random.standard_normal((int(random.integers(1, 5)), 4)).astype(np.float32)
        inputs = serving.infer_inputs(module, {"x": x})
        sent = asyncio.ensure_future(client.infer(name, inputs))
        # Not over gRPC: tritonserver 24.10 dies of a segfault in its frontend now and then, where
        # calls are cancelled under full load. (Cancellation itself is tested in test_requests.py.)
        if module is tritonclient.http and random.random() < _CANCELLED:
            await asyncio.sleep(float(random.random()) * 0.003)
            sent.cancel()
        outcome = "right"
        try:
            serving.check_result(await sent, {"y": scenarios.eager(_AFFINE, x=x)})
        except asyncio.CancelledError:
            outcome = "cancelled"
        except InferenceServerException as error:
            # Without what differs from one to the next.
            text = error.message().replace("[request id: <id_unknown>] ", "")
            outcome = f"{error.status()} {text[:90]}"
        outcomes[name][outcome] += 1
    await client.close()


async def _every(seconds: float, over: asyncio.Event, once: Callable[[], None]) -> int:
    """Do something at intervals until it is over; return how often."""
    times = 0
    while True:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(over.wait(), seconds)
            return times
        await asyncio.to_thread(once)
        times += 1


def _reload(server: Supervised, model: str) -> None:
    """Unload and load, as an operator would by hand."""
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:

        def unloaded() -> bool:
            states = {one.name: one.state for one in client.get_model_repository_index().models}
            return bool(states[model] == "UNAVAILABLE")

        client.unload_model(model)
        server.until(unloaded)
        client.load_model(model)
    server.until(lambda: server.ready(model))


def _kill(server: Supervised, model: str) -> None:
    """Kill one of a model's instances with -9, and wait until the model is ready again."""
    before = server.stubs(model)
    before[0].kill()
    living.wait(before)
    server.until(lambda: server.ready(model))


def _look(watched: Sequence[psutil.Process], prefix: str) -> Sample:
    """Return the memory and open files of processes, and the regions of shared memory."""
    sample: Sample = {}
    for process in watched:
        # Without files: their pages are its own while no other process maps them.
        text = Path(f"/proc/{process.pid}/status").read_text()
        (kilobytes,) = re.findall(r"RssAnon:\s+(\d+) kB", text)
        sample["MiB", process.pid] = int(kilobytes) / 1024
        sample["files", process.pid] = process.num_fds()
    regions = list(Path("/dev/shm").glob(f"{prefix}*"))
    sizes = 0
    for region in regions:
        with contextlib.suppress(FileNotFoundError):  # its instance has just ended
            sizes += region.stat().st_size
    return sample | {("regions", 0): len(regions), ("shared", 0): sizes / 2**20}


def _assert_flat(samples: Sequence[Sample]) -> None:
    """The last quarter needs what the second one needed: medians, for a load may be in a sample."""
    quarter = len(samples) // 4
    for key in samples[0]:
        early = statistics.median(one[key] for one in samples[quarter : 2 * quarter])
        late = statistics.median(one[key] for one in samples[-quarter:])
        print(f"{key}: {early:.0f}, later {late:.0f}")
        factor, added = _GROWTH[key[0]]
        assert late <= early * factor + added
