"""Streams: their responses, the order of these, how streams end, and steps that they share."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock

import fake_gpu
import pytest
import torch
from streamed import Recorder, engine, item, run
from torch import Tensor

from torch_py_backend.composition import model, stand_in
from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.streams import Streams
from torch_py_backend.errors import ForwardError, OutputError
from torch_py_backend.values import Value


def _one(forward: Any, client: Recorder | None = None) -> Recorder:
    """Return the client of one stream."""
    client = client or Recorder()
    run(engine(forward), (item(1), client))
    return client


def test_streams_take_turns() -> None:
    order = []

    def forward(x: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            order.append(int(x))
            yield x

    run(engine(forward), (item(1), Recorder()), (item(2), Recorder()))
    assert order == [1, 2] * 3


def test_an_awaiting_stream_does_not_block_others() -> None:
    finished = asyncio.Event()

    async def forward(x: Tensor) -> AsyncIterator[Tensor]:
        if int(x) == 1:
            await finished.wait()
        for _ in range(5):
            yield x
        finished.set()

    waiting, running = Recorder(), Recorder()
    run(engine(forward), (item(1), waiting), (item(2), running))
    assert len(running.values) == len(waiting.values) == 5


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_any_exception_ends_the_stream(error: type[BaseException]) -> None:
    def forward(x: Tensor) -> Iterator[Tensor]:
        yield x
        raise error

    assert isinstance(_one(forward).error, ForwardError)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_outputs_go_to_where_the_request_was(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(Engine, "to_device", lambda _, columns: list(map(fake_gpu.put, columns)))
    model = engine(lambda x: fake_gpu.put(2 * x))
    model.device, model.host_inputs = fake_gpu.DEVICE, False
    with model.preparing():  # the stages are chosen again
        pass
    sent: list[Any] = []

    class Keeps(Recorder):
        def send(self, outcome: dict[str, Value], last: bool) -> bool:
            sent.append(outcome["y"])
            return super().send(outcome, last)

    x = torch.ones(1, 2)
    run(model, ({"x": fake_gpu.put(x) if on_gpu else x}, Keeps()))
    assert [(value.tolist(), value.is_cuda) for value in sent] == [([[2.0, 2.0]], on_gpu)]


@pytest.mark.parametrize(
    ("value", "leaves", "says"),
    [(torch.ones(1, 4), 1, "not so fast"), (torch.ones(1, 4).long(), None, "is int64")],
)
def test_a_generator_that_fails_when_it_is_closed_hides_no_earlier_error(
    value: Tensor, leaves: int | None, says: str
) -> None:
    def forward(x: Tensor) -> Iterator[Tensor]:
        try:
            yield value
        finally:
            raise ValueError("not so fast")

    assert says in str(_one(forward, Recorder(leaves)).error)


def test_each_call_of_the_model_has_a_time_limit_of_its_own() -> None:
    model, called = engine(lambda x: iter([x, x])), mock.Mock()
    model.failures.on_call = called
    run(model, (item(1), Recorder()))
    assert called.call_count == 1 + 2 + 1  # forward(), two responses, the end


def test_a_context_open_at_a_yield() -> None:
    """A stream that yields within a thread-wide context ends; no other stream runs in it."""
    inside = []

    async def forward(x: Tensor) -> AsyncIterator[Tensor]:
        if int(x) == 1:
            with torch.autocast("cpu"):
                yield x
        await asyncio.sleep(0)
        inside.append(torch.is_autocast_enabled("cpu"))
        yield x

    before = runtime.thread_state(torch.device("cpu"))
    failing, other = Recorder(), Recorder()
    run(engine(forward), (item(1), failing), (item(2), other))
    assert "yields within torch.autocast" in str(failing.error)
    assert failing.text == ""
    assert other.values == [[[2.0]]]
    assert inside == [False]
    assert runtime.thread_state(torch.device("cpu")) == before


State = tuple[Tensor, int]


class Counter:
    """Counts up from x, `count` times, and records the number of streams of each step."""

    def __init__(self, count: int = 3, *, fails_at: float = 1e9, most: int = 1000) -> None:
        self.sizes: list[int] = []
        self._count, self._fails_at, self._most = count, fails_at, most

    def begin(self, x: Tensor) -> State:
        return x, self._count

    def step(self, states: list[State]) -> list[tuple[State | None, Tensor]]:
        self.sizes.append(len(states))
        if len(states) > self._most:
            raise MemoryError
        if any(float(value) >= self._fails_at for value, _ in states):
            raise ValueError("too much")
        return [((value + 1, left - 1) if left > 1 else None, value) for value, left in states]


def _run(model: Any, *pairs: tuple[Any, Recorder], **overrides: Any) -> Streams:
    return run(engine(model.begin, model.step, **overrides), *pairs)


def _kept(count: int) -> list[tuple[Any, Recorder]]:
    return [(item(10.0 * number), Recorder()) for number in range(count)]


def test_streams_of_different_lengths() -> None:
    """A stream that ends leaves the shared step, and a stream that begins later joins it."""
    model = Counter(4)
    streams = Streams(engine(model.begin, model.step))
    late = Recorder()

    class Early(Recorder):
        """Begins another stream at its first response."""

        def send(self, outcome: dict[str, Value], last: bool) -> bool:
            if not others:
                others.append(asyncio.create_task(late.receive(streams, item(10))))
            return super().send(outcome, last)

    others: list[asyncio.Task[Any]] = []
    early = Early(leaves_after=3)

    async def staggered() -> None:
        await early.receive(streams, item(0))
        await asyncio.gather(*others)

    asyncio.run(staggered())
    assert len(early.values) == 3
    assert len(late.values) == 4
    assert model.sizes == [1, 2, 2, 1, 1]


@pytest.mark.parametrize(
    "limits", [{}, {"fails_at": 30}, {"most": 2}], ids=["one step", "halves", "out of memory"]
)
def test_streams_get_their_own_values_and_only_failing_ones_end(limits: dict[str, float]) -> None:
    """Also if another call overwrites the outputs' memory; a failed step is halved."""

    class Reuses(Counter):
        memory = torch.zeros(8, 1, 1)

        def begin(self, x: Tensor) -> State:
            self.memory[:] = -1  # when a stream begins, outputs of others have not been sent yet
            return super().begin(x)

        def step(self, states: list[State]) -> list[tuple[State | None, Tensor]]:
            pairs = super().step(states)
            for place, (_, value) in enumerate(pairs):
                self.memory[place] = value
            return [(state, self.memory[place]) for place, (state, _) in enumerate(pairs)]

    pairs, model = _kept(4), Reuses(**limits)  # type: ignore[arg-type]
    streams = _run(model, *pairs)
    for number, (_, recorder) in enumerate(pairs):
        start = 10.0 * number
        fails = start >= limits.get("fails_at", 1e9)
        assert recorder.values == ([] if fails else [[[start]], [[start + 1]], [[start + 2]]])
        assert isinstance(recorder.error, ForwardError) is fails
        assert ("ValueError: too much" in recorder.text) is fails
    assert model.sizes[-1] == (2 if "most" in limits else 3 if limits else 4)  # shared again
    assert streams._engine.counts.stepped_streams == sum(model.sizes)


@pytest.mark.parametrize("calls", [False, True], ids=["RETRY_FAILED_BATCH", "a call"])
def test_steps_that_are_not_run_again(calls: bool) -> None:
    """A failed step ends all its streams without retries, or if it has called another model."""

    class Calls(Counter):
        def step(self, states: list[State]) -> list[tuple[State | None, Tensor]]:
            if calls:
                model("other")()
            return super().step(states)

    failing, pairs = Calls(fails_at=30), _kept(4)
    with stand_in({"other": dict}):
        _run(failing, *pairs, retry_failed_batch=None if calls else False)
    assert all(isinstance(recorder.error, ForwardError) for _, recorder in pairs)
    assert failing.sizes == [4]


def test_a_stream_keeps_its_current_state_only() -> None:
    """States may hold most of the memory."""
    first: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    class Model:
        def begin(self, x: Tensor) -> Tensor:
            state = torch.ones(1, 1)
            first.append(weakref.ref(state))
            return state

        def step(self, states: list[Tensor]) -> list[tuple[Tensor | None, Tensor]]:
            alive.append(first[0]() is not None)
            return [(torch.ones(1, 1) if len(alive) < 4 else None, torch.ones(1, 1))]

    recorder = Recorder()
    _run(Model(), (item(1), recorder))
    assert len(recorder.values) == 4
    assert alive[0]
    assert not any(alive[2:])


def _autocast_stays(states: list[Any]) -> Any:
    torch.autocast("cpu", torch.bfloat16).__enter__()
    return [(None, torch.ones(1, 1)) for _ in states]


_ONES = torch.ones(2, 1)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda _: [], "a list without a pair for each stream"),
        (lambda _: [_ONES, _ONES], "a list without"),
        (lambda _: [(None, None, None)] * 2, "expected a list with 2 pairs"),
        (lambda _: _ONES, "a Tensor"),
        (lambda _: (_ONES, _ONES), "a tuple without a pair"),  # it can be unpacked
        (_autocast_stays, "yields within torch.autocast"),
    ],
)
def test_step_that_would_swap_or_spoil_streams_ends_all(step: Any, says: str) -> None:
    """Halves are not tried: with one stream the same result may look right."""
    enabled, recorders = torch.is_autocast_enabled("cpu"), [Recorder(), Recorder()]
    called = mock.Mock(side_effect=step)
    try:
        run(engine(Counter().begin, called), *((item(1), recorder) for recorder in recorders))
    finally:
        torch.set_autocast_enabled("cpu", enabled)
    assert called.call_count == 1
    for recorder in recorders:
        assert isinstance(recorder.error, OutputError)
        assert says in str(recorder.error)
