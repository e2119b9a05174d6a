"""`serve` under full load, with cancellations, loads and unloads, and instances that are killed.

Every answer is right or a clear error, every request is accounted for, nothing grows, and what was
killed is back. The short form runs with the tests; `make soak` (SOAK_SECONDS) takes twenty minutes.
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
from typing import Any, TypeAlias

import living
import models
import numpy as np
import psutil
import pytest
import scenarios
import serving
import supervised
import tritonclient.grpc.aio
import tritonclient.http.aio
from scenarios import Call, Scenario, tensor
from supervised import Supervised
from tritonclient.utils import InferenceServerException

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
_BATCHED = "dynamic_batching { max_queue_delay_microseconds: 500 }\n"
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
Random: TypeAlias = np.random.Generator


# --- models ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """A model, and how a good request for it is made up, with its answer."""

    scenario: Scenario
    call: Callable[[Random], Call]

    @property
    def name(self) -> str:
        return self.scenario.name


_AFFINE = scenarios.affine()


def _affine(random: Random) -> Call:
    x = random.standard_normal((_rows(random), 4)).astype(np.float32)
    return Call({"x": x}, {"y": scenarios.eager(_AFFINE, x=x)})


def _affine_of(name: str, instances: int) -> Served:
    group = f"instance_group [{{ kind: KIND_CPU count: {instances} }}]\n"
    files = scenarios.both(scenarios.python(models.Affine), scenarios.safe(_AFFINE.state_dict()))
    config = scenarios.config({"x": [4]}, {"y": [3]}, more=_BATCHED + group)
    return Served(Scenario(name, files, config), _affine)


def _rows(random: Random) -> int:
    return int(random.integers(1, 5))


def _blobs(random: Random) -> Call:
    blobs = np.empty((_rows(random), 2), dtype=np.object_)
    blobs.ravel()[:] = [random.bytes(int(random.integers(0, 9))) for _ in range(blobs.size)]
    return Call({"blobs": blobs}, {"y": blobs[:, ::-1]})


def _padded(random: Random) -> Call:
    rows, length = _rows(random), int(random.integers(1, 9))
    ids = random.integers(0, 99, (rows, length))
    mask = random.integers(0, 2, (rows, length))
    is_sent = bool(random.integers(2))
    used = mask if is_sent else np.ones_like(ids)
    return Call(
        {"ids": ids, **({"mask": mask} if is_sent else {})},
        {"y": ids * 100 + used.cumsum(1) * used, "count": used.sum(1, keepdims=True)},
    )


_STEADY = (
    _affine_of("affine", 2),
    Served(
        Scenario(
            "blobs",
            scenarios.python(models.Blobs),
            scenarios.config({}, {}, more=_BATCHED)
            + tensor("input", "blobs", [2], "STRING")
            + tensor("output", "y", [2], "STRING"),
        ),
        _blobs,
    ),
    Served(
        Scenario(
            "padded",
            scenarios.python(models.Tokens),
            scenarios.tokens(
                '{"ids": {"multiple_of": 4, "mask": "mask", "outputs": ["y"]}}', _BATCHED
            ),
        ),
        _padded,
    ),
)
_RELOADED = _affine_of("reloaded", 1)
_KILLED = _affine_of("killed", 2)
_ALL = (*_STEADY, _RELOADED, _KILLED)


@dataclass
class Counts:
    """What became of the requests to one model."""

    sent: int = 0
    right: int = 0
    cancelled: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Supervised]:
    for model in _ALL:
        model.scenario.lay_out(tmp_path / "repository")
    with supervised.serve(tmp_path / "repository", "--restarts=1000") as server:
        server.wait_loaded()
        assert all(server.ready(model.name) for model in _ALL), server.text
        yield server


@pytest.mark.slow
def test_soak(server: Supervised) -> None:
    """Nothing is answered wrongly, lost, or kept for longer than it is needed."""
    counts, samples, disturbed = asyncio.run(_soak(server, _SECONDS))
    for name, count in counts.items():
        print(f"{name}: {count}")
        assert count.sent == count.right + count.cancelled + sum(count.refused.values())
        assert count.right
        assert all(any(part in text for part in _CLEAR) for text in count.refused), count.refused
    print(f"unloads and loads: {disturbed['reloaded']}; kills: {disturbed['killed']}")
    assert disturbed["reloaded"]
    assert disturbed["killed"]
    assert not any(counts[model.name].refused for model in _STEADY)  # nothing touched them
    _assert_flat(samples)


# --- load --------------------------------------------------------------------------------------


async def _soak(
    server: Supervised, seconds: float
) -> tuple[dict[str, Counts], list[Sample], collections.Counter[str]]:
    counts = {model.name: Counts() for model in _ALL}
    samples: list[Sample] = []
    disturbed: collections.Counter[str] = collections.Counter()
    over = asyncio.Event()
    control = _Control(server)
    tasks = [
        *(_ask(number, server, counts, over) for number in range(2 * _CLIENTS)),
        _sample(server, samples, over),
        _disturb(lambda: control.reload(_RELOADED.name), _PAUSE_S, "reloaded", disturbed, over),
        _disturb(lambda: control.kill(_KILLED.name), _LIFE_S, "killed", disturbed, over),
    ]
    running = [asyncio.create_task(task) for task in tasks]
    # Whichever fails ends it for all.
    await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    over.set()
    _, hanging = await asyncio.wait(running, timeout=_GRACE_S)
    assert not hanging, [str(task.get_stack()[-1:]) for task in hanging]
    await asyncio.gather(*running)
    return counts, samples, disturbed


async def _ask(
    number: int, server: Supervised, counts: dict[str, Counts], over: asyncio.Event
) -> None:
    """Send requests one after another, half of the clients over HTTP."""
    random = np.random.default_rng(number)
    module: Any = (tritonclient.http, tritonclient.grpc)[number % 2]
    client = module.aio.InferenceServerClient((server.http, server.grpc)[number % 2])
    while not over.is_set():
        model = _ALL[int(random.integers(len(_ALL)))]
        call, count = model.call(random), counts[model.name]
        count.sent += 1
        inputs = serving.infer_inputs(module, call.inputs)
        sent = asyncio.ensure_future(client.infer(model.name, inputs))
        # Not over gRPC: tritonserver 24.10 dies of a segfault in its frontend now and then, where
        # calls are cancelled under full load. (Cancellation itself is tested in test_fatal.py.)
        if module is tritonclient.http and random.random() < _CANCELLED:
            await asyncio.sleep(float(random.random()) * 0.003)
            sent.cancel()
        try:
            serving.check_result(await sent, call.expected)  # type: ignore[arg-type]
            count.right += 1
        except asyncio.CancelledError:
            count.cancelled += 1
        except InferenceServerException as error:
            # Without what differs from one to the next.
            text = error.message().replace("[request id: <id_unknown>] ", "")
            count.refused[f"{error.status()} {text[:90]}"] += 1
    await client.close()


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
    watched += [one for model in _STEADY for one in server.stubs(model.name)]
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
