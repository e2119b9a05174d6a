"""`serve` under full load, with cancellations, loads and unloads, and instances that are killed.

Every answer is right or a clear error, every request is accounted for, nothing grows, and who was
killed is back without anyone's help. The short form runs with the tests; `make soak` (SOAK_SECONDS)
takes twenty minutes.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hostile
import living
import numpy as np
import psutil
import pytest
import supervised
import tritonclient.grpc.aio
from hostile import SERVED, Answer, Grpc, Http
from supervised import Supervised

_SECONDS = float(os.environ.get("SOAK_SECONDS", "20"))
_CLIENTS = 6  # of each protocol
_SAMPLE_S = 0.5
# Between two cycles of unload and load.
_PAUSE_S = 4.0
_CANCELLED = 0.03
# The slowest that may be under way at the end: a load.
_GRACE_S = 240.0

# Between a killed model's return and the next kill; the count of attempts starts anew meanwhile.
_LIFE_S = 6.0

_RELOADED = hostile.affine("reloaded")
_KILLED = hostile.affine("killed", instances=2)
_STEADY = tuple(one for one in SERVED if one.name in {"affine", "mixed", "padded", "blobs"})
_ALL = (*_STEADY, _RELOADED, _KILLED)
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


@dataclass
class Counts:
    """What became of the requests to one model."""

    sent: int = 0
    right: int = 0
    cancelled: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def accounted(self) -> int:
        return self.right + self.cancelled + sum(self.refused.values()) + len(self.wrong)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Supervised]:
    for served in _ALL:
        served.scenario.lay_out(tmp_path / "repository")
    with supervised.serve(tmp_path / "repository", "--restarts=1000") as server:
        server.wait_loaded()
        assert all(server.ready(served.name) for served in _ALL), server.text
        yield server


@pytest.mark.slow
def test_soak(server: Supervised) -> None:
    """Nothing is answered wrongly, lost, or kept for longer than it is needed."""
    counts, samples, disturbed = asyncio.run(_soak(server, _SECONDS))

    for served in _ALL:
        told = counts[served.name]
        print(f"{served.name}: sent {told.sent}, right {told.right}, cancelled {told.cancelled},"
              f" refused {sum(told.refused.values())} {dict(told.refused)}")  # fmt: skip
        assert not told.wrong, told.wrong[:3]
        assert told.sent == told.accounted
        assert told.right
        assert all(any(part in text for part in _CLEAR) for text in told.refused), told.refused
    print(f"unloads and loads: {disturbed['reloaded']}; kills: {disturbed['killed']}")
    assert disturbed["reloaded"]
    assert disturbed["killed"]
    for served in _STEADY:  # whose instances nobody touched
        assert not counts[served.name].refused
    _assert_flat(samples)


# --- load --------------------------------------------------------------------------------------


async def _soak(
    server: Supervised, seconds: float
) -> tuple[dict[str, Counts], list[Sample], collections.Counter[str]]:
    counts = {served.name: Counts() for served in _ALL}
    samples: list[Sample] = []
    disturbed: collections.Counter[str] = collections.Counter()
    over = asyncio.Event()
    control = _Control(server)
    clients: list[Http | Grpc] = [Http(server.http) for _ in range(_CLIENTS)]
    clients += [Grpc(server.grpc) for _ in range(_CLIENTS)]
    tasks = [
        *(_ask(client, number, counts, over) for number, client in enumerate(clients)),
        _sample(server, samples, over),
        _disturb(lambda: control.reload(_RELOADED.name), _PAUSE_S, "reloaded", disturbed, over),
        _disturb(lambda: control.kill(_KILLED.name), _LIFE_S, "killed", disturbed, over),
    ]
    running = [asyncio.create_task(task) for task in tasks]
    # Whoever fails ends it for all.
    await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    over.set()
    _, hanging = await asyncio.wait(running, timeout=_GRACE_S)
    assert not hanging, [str(task.get_stack()[-1:]) for task in hanging]
    await asyncio.gather(*running)
    return counts, samples, disturbed


async def _ask(
    client: Http | Grpc, number: int, counts: dict[str, Counts], over: asyncio.Event
) -> None:
    """Requests one after another; some are cancelled on their way, or their connection closed."""
    random = np.random.default_rng(number)
    while not over.is_set():
        served = _ALL[int(random.integers(len(_ALL)))]
        call, told = served.call(random), counts[served.name]
        told.sent += 1
        asked = asyncio.ensure_future(client.infer(served.name, call.inputs))
        # Not over gRPC: tritonserver 24.10 dies of a segfault in its frontend now and then, where
        # calls are cancelled under full load. (Cancellation itself is tested in test_fatal.py.)
        cancelled = isinstance(client, Http) and random.random() < _CANCELLED
        await _answered(asked, call, told, random, cancelled=cancelled)
    await client.close()


async def _answered(
    asked: asyncio.Future[Answer], call: Any, told: Counts, random: Any, *, cancelled: bool
) -> None:
    if cancelled:
        await asyncio.sleep(float(random.random()) * 0.003)
        asked.cancel()
    try:
        answer = await asked
    except asyncio.CancelledError:
        told.cancelled += 1
        return
    if hostile.right(call, answer):
        told.right += 1
    elif answer.good:
        told.wrong.append(f"{call} {answer}")
    else:
        # Without what differs from one to the next.
        text = answer.text.replace("[request id: <id_unknown>] ", "")
        told.refused[f"{answer.status} {text[:90]}"] += 1


# --- what happens meanwhile --------------------------------------------------------------------


async def _disturb(
    once: Callable[[], Any],
    pause: float,
    name: str,
    disturbed: collections.Counter[str],
    over: asyncio.Event,
) -> None:
    while not over.is_set():
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(over.wait(), pause)
            return
        await once()
        disturbed[name] += 1


class _Control:
    """What disturbs a model; each returns once it is ready again."""

    def __init__(self, server: Supervised) -> None:
        self._server = server

    async def reload(self, model: str) -> None:
        """Unload and load, as an operator would by hand."""
        client = tritonclient.grpc.aio.InferenceServerClient(self._server.grpc)
        await client.unload_model(model)
        while await self._state(client, model) != "UNAVAILABLE":  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.05)
        await client.load_model(model)
        await client.close()
        await self._until_ready(model)

    async def kill(self, model: str) -> None:
        """One of its instances, with -9."""
        before = self._server.stubs(model)
        before[0].kill()
        while living.left(before):  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.05)
        await self._until_ready(model)

    async def _until_ready(self, model: str) -> None:
        while not await asyncio.to_thread(self._server.ready, model):  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.05)

    @staticmethod
    async def _state(client: Any, model: str) -> str:
        index = await client.get_model_repository_index()
        (state,) = [one.state for one in index.models if one.name == model]
        return str(state)


# --- what must not grow ------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One look at the processes that live throughout.

    Attributes:
        memory: MiB that each process allocated, by its number.
        files: open files of each process.
        regions: how many regions of shared memory there are.
        shared: their MiB.
    """

    memory: dict[int, float]
    files: dict[int, int]
    regions: int
    shared: float


async def _sample(server: Supervised, samples: list[Sample], over: asyncio.Event) -> None:
    watched = [psutil.Process(server.process.pid), server.triton()]
    watched += [one for served in _STEADY for one in server.stubs(served.name)]
    while not over.is_set():
        samples.append(_look(watched, server.prefix()))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(over.wait(), _SAMPLE_S)


def _look(watched: Sequence[psutil.Process], prefix: str) -> Sample:
    regions = list(Path("/dev/shm").glob(f"{prefix}*"))
    return Sample(
        {one.pid: _anonymous(one.pid) / 2**20 for one in watched},
        {one.pid: one.num_fds() for one in watched},
        len(regions),
        sum(_size(one) for one in regions) / 2**20,
    )


def _anonymous(pid: int) -> int:
    """The bytes of a process without files: their pages are its own while no other maps them."""
    (line,) = re.findall(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(line) << 10


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # its instance has just ended
        return 0


def _assert_flat(samples: Sequence[Sample]) -> None:
    """The last quarter needs what the second one needed.

    Medians, for a sample may fall into a load. Allowed on top: for memory 8 % and 16 MiB, what
    allocators keep of a burst; for files as many as there are clients, for a connection may be
    opened anew; for regions the instances that are loaded again at that moment.
    """
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]

    def medians(look: Callable[[Sample], float]) -> tuple[float, float]:
        return statistics.median(map(look, early)), statistics.median(map(look, late))

    for pid in samples[0].memory:
        before, after = medians(lambda one, pid=pid: one.memory[pid])  # type: ignore[misc]
        print(f"process {pid}: {before:.0f} MiB, later {after:.0f} MiB")
        assert after <= before * 1.08 + 16
        before, after = medians(lambda one, pid=pid: one.files[pid])  # type: ignore[misc]
        print(f"process {pid}: {before:.0f} files, later {after:.0f}")
        assert after <= before + 2 * _CLIENTS
    before, after = medians(lambda one: one.regions)
    print(f"{before:.0f} regions, later {after:.0f}")
    assert after <= before + 6
    before, after = medians(lambda one: one.shared)
    print(f"{before:.0f} MiB of shared memory, later {after:.0f} MiB")
    assert after <= before * 1.08 + 4
