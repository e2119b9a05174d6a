"""A request's stream: what it gives, in which order, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from streamed import Kept, engine, item
from torch import Tensor

from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import Item
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import CancelledError, ForwardError, InputError, OutputError
from torch_py_backend.streaming.streams import Streams, first, trial


def _run(made: Engine, *pairs: tuple[Item, Kept]) -> Streams:
    """Streams that begin together, run to their ends."""
    streams = Streams(made)

    async def together() -> None:
        await asyncio.gather(*(streams.run(*pair) for pair in pairs))

    asyncio.run(together())
    assert streams.live == 0
    assert all(kept.ends == 1 for _, kept in pairs)
    return streams


def _three(x: Tensor) -> Iterator[Tensor]:
    for factor in (1, 2, 3):
        yield factor * x


async def _three_awaited(x: Tensor) -> AsyncIterator[Tensor]:
    for factor in (1, 2, 3):
        await asyncio.sleep(0)
        yield factor * x


class _Iterator:
    """Iterates, and is no generator."""

    def __init__(self, x: Tensor) -> None:
        self._values = _three(x)

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Tensor:
        return next(self._values)


@pytest.mark.parametrize(
    ("forward", "values"),
    [
        (_three, [2.0, 4.0, 6.0]),
        (_three_awaited, [2.0, 4.0, 6.0]),
        (lambda x: _three(x + 0), [2.0, 4.0, 6.0]),
        (_Iterator, [2.0, 4.0, 6.0]),
        (lambda x: iter(()), []),
        (lambda x: 5 * x, [10.0]),
    ],
    ids=["generator", "asynchronous", "returned", "iterator", "empty", "no-stream"],
)
def test_what_a_stream_gives(forward: Any, values: list[float]) -> None:
    """What the model yields, in its order; what is no stream is its own only response."""
    kept = Kept()
    _run(engine(forward), (item(2), kept))
    assert kept.values == [[[one]] for one in values]
    assert kept.error is None


def test_streams_take_turns() -> None:
    """Each stream waits for one step of the others, however long they are."""
    order = []

    def forward(x: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            order.append(int(x))
            yield x

    _run(engine(forward), (item(1), Kept()), (item(2), Kept()))
    assert order == [1, 2] * 3


def test_who_waits_blocks_nobody() -> None:
    """An asynchronous stream that waits leaves all turns to the others."""
    go_on = asyncio.Event()

    async def forward(x: Tensor) -> AsyncIterator[Tensor]:
        if int(x) == 1:
            await go_on.wait()
        for _ in range(5):
            yield x
        go_on.set()

    waits, runs = Kept(), Kept()
    _run(engine(forward), (item(1), waits), (item(2), runs))
    assert len(runs.values) == len(waits.values) == 5


def test_an_error_ends_its_own_stream() -> None:
    """A stream that raises gives what it had; the others go on."""

    def forward(x: Tensor) -> Iterator[Tensor]:
        yield x
        if int(x) == 1:
            raise ValueError("one")
        yield 10 * x

    guilty, other = Kept(), Kept()
    _run(engine(forward), (item(1), guilty), (item(2), other))
    assert guilty.values == [[[1.0]]]
    assert isinstance(guilty.error, ForwardError)
    assert "ValueError: one" in guilty.text
    assert other.values == [[[2.0]], [[20.0]]]
    assert other.error is None


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_no_exception_leaves_a_stream(error: type[BaseException]) -> None:
    """Not even what ends programs, tasks or generators."""

    def forward(x: Tensor) -> Iterator[Tensor]:
        yield x
        raise error

    kept = Kept()
    _run(engine(forward), (item(1), kept))
    assert isinstance(kept.error, ForwardError)


@pytest.mark.parametrize(
    "odd",
    [torch.ones(2, 1), torch.ones(1, 1, dtype=torch.int64), "text", None, {"z": torch.ones(1)}],
    ids=["rows", "dtype", "string", "none", "name"],
)
def test_every_response_is_verified(odd: Any) -> None:
    """A response in mid-stream that the config contradicts ends the stream."""

    def forward(x: Tensor) -> Iterator[Any]:
        yield {"y": x}
        yield {"y": odd} if not isinstance(odd, dict) else odd

    kept = Kept()
    _run(engine(forward), (item(1), kept))
    assert kept.values == [[[1.0]]]
    assert isinstance(kept.error, OutputError)


def test_values_that_are_not_finite() -> None:
    """CHECK_FINITE holds for each response."""

    def forward(x: Tensor) -> Iterator[Tensor]:
        yield x
        yield x / 0

    kept = Kept()
    _run(engine(forward, check_finite=True), (item(1), kept))
    assert kept.values == [[[1.0]]]
    assert "NaN or infinity" in str(kept.error)


def test_a_wrong_item_is_refused() -> None:
    """What the model does not take never begins."""
    kept = Kept()
    _run(engine(_three), ({}, kept))
    assert isinstance(kept.error, InputError)
    assert kept.values == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_leaves_is_not_served(asynchronous: bool) -> None:
    """A consumer that has gone closes its generator, whose own clean-up runs."""
    closed = []

    def forward(x: Tensor) -> Iterator[Tensor]:
        try:
            while True:
                yield x
        finally:
            closed.append(int(x))

    async def awaited(x: Tensor) -> AsyncIterator[Tensor]:
        try:
            while True:
                yield x
        finally:
            await asyncio.sleep(0)
            closed.append(int(x))

    kept = Kept(leaves_after=4)
    _run(engine(awaited if asynchronous else forward), (item(3), kept))
    assert len(kept.values) == 4
    assert isinstance(kept.error, CancelledError)
    assert closed == [3]


def test_a_clean_up_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """What a generator raises when it is closed is logged, and changes nothing."""

    def forward(x: Tensor) -> Iterator[Tensor]:
        try:
            while True:
                yield x
        finally:
            raise ValueError("not so fast")

    kept = Kept(leaves_after=1)
    _run(engine(forward), (item(3), kept))
    assert isinstance(kept.error, CancelledError)
    assert "what ends a stream raised ValueError: not so fast" in caplog.text


def test_the_engine_is_free_between_steps() -> None:
    """Who changes the model waits for a step, and not for the end of a stream."""
    seen = []

    def other() -> None:
        seen.append(made.turn.acquire(blocking=False))

    def forward(x: Tensor) -> Iterator[Tensor]:
        for _ in range(2):
            asker = threading.Thread(target=other)
            asker.start()
            asker.join()
            yield x

    made = engine(forward)

    class Asks(Kept):
        def cancelled(self) -> bool:
            other()
            made.turn.release()
            return False

    _run(made, (item(1), Asks()))
    assert seen == [False, True, False, True]


def test_each_step_is_a_call() -> None:
    """Whoever watches sees each step begin, and the rest after it."""
    made = engine(_three)
    told: list[str] = []
    made.recovery.begins = lambda: told.append("busy")
    streams = Streams(made, lambda: told.append("idle"))
    asyncio.run(streams.run(item(1), Kept()))
    assert told == ["busy", "idle"] * (len(told) // 2)
    assert len(told) >= 2 * 4


def test_steps_run_in_inference_mode() -> None:
    """Every step has the surroundings of a call."""

    def forward(x: Tensor) -> Iterator[Tensor]:
        for _ in range(2):
            yield x + torch.is_inference_mode_enabled()

    kept = Kept()
    _run(engine(forward), (item(1), kept))
    assert kept.values == [[[2.0]], [[2.0]]]


@pytest.mark.parametrize("context", ["autocast", "device"])
def test_a_context_that_stays_open(context: str) -> None:
    """A stream that yields within a context of its thread's ends; the thread is as it was."""

    def forward(x: Tensor) -> Iterator[Tensor]:
        with torch.autocast("cpu") if context == "autocast" else torch.device("cpu"):
            yield x

    before = runtime.contexts(torch.device("cpu"))
    kept = Kept()
    _run(engine(forward), (item(1), kept))
    assert "yields within torch.autocast" in str(kept.error)
    assert runtime.contexts(torch.device("cpu")) == before


def test_a_context_in_which_a_stream_waits() -> None:
    """Other streams, whose turn it is then, do not run in it, nor does any later one."""
    inside = []

    async def forward(x: Tensor) -> AsyncIterator[Tensor]:
        if int(x) == 1:
            with torch.autocast("cpu"):
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        inside.append(torch.is_autocast_enabled("cpu"))
        yield x

    before = runtime.contexts(torch.device("cpu"))
    guilty, other = Kept(), Kept()
    _run(engine(forward), (item(1), guilty), (item(2), other))
    assert "or awaits there" in str(guilty.error)
    assert guilty.text == ""
    assert other.values == [[[2.0]]]
    assert inside == [False]
    assert runtime.contexts(torch.device("cpu")) == before


def test_a_trial_takes_the_first_responses() -> None:
    """A warm-up of an endless stream ends."""
    steps = []

    def forward(x: Tensor) -> Iterator[Tensor]:
        while True:
            steps.append(1)
            yield x * len(steps)

    (outcome,) = trial(engine(forward))([item(1)])
    assert isinstance(outcome, dict)
    assert torch.as_tensor(outcome["y"]).tolist() == [[3.0]]
    assert len(steps) == 3


def test_a_trial_tells_what_fails() -> None:
    """A stream that fails in its first responses fails the warm-up, with its traceback."""

    def forward(x: Tensor) -> Iterator[Tensor]:
        yield x
        raise ValueError("second")

    made = engine(forward)
    (outcome,) = trial(made)([item(1)])
    assert isinstance(outcome, ForwardError)
    ((_, text),) = made.recovery.reports
    assert "ValueError: second" in text


@pytest.mark.parametrize(
    ("result", "found"),
    [(_three(torch.ones(1)), 1.0), (_three_awaited(torch.ones(1)), 1.0), (torch.ones(1), 1.0)],
    ids=["generator", "asynchronous", "no-stream"],
)
def test_first(result: Any, found: float) -> None:
    """The first response tells what a model's outputs are."""
    assert float(first("digits", None, result)) == found


def test_first_of_nothing() -> None:
    """A stream without responses tells nothing, and that is said."""
    with pytest.raises(OutputError, match="without a response"):
        first("digits", None, iter(()))
