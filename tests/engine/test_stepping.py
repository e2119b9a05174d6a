"""Continuous batching: live streams share each call of step()."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest
import torch
from streamed import Recorder, engine, item, run
from torch import Tensor

from torch_py_backend.composition import model, stand_in
from torch_py_backend.engine.streams import Streams
from torch_py_backend.errors import ForwardError, OutputError
from torch_py_backend.values import Value

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

        def send(self, outcome: dict[str, Value], *, last: bool) -> None:
            super().send(outcome, last=last)
            if len(self.values) == 1:
                others.append(asyncio.create_task(streams.run(item(10), late)))

    others: list[asyncio.Task[Any]] = []
    early = Early(leaves_after=3)

    async def staggered() -> None:
        await streams.run(item(0), early)
        await asyncio.gather(*others)

    asyncio.run(staggered())
    assert len(early.values) == 3
    assert len(late.values) == 4
    assert model.sizes == [1, 2, 2, 1, 1]


def test_only_failing_streams_end() -> None:
    """A failed step is bisected: failing streams end, the others get all their responses."""
    model, pairs = Counter(fails_at=30), _kept(4)  # 0, 10, 20, and 30, which fails
    streams = _run(model, *pairs)
    for sent, recorder in pairs[:3]:
        start = float(sent["x"])
        assert recorder.values == [[[start]], [[start + 1]], [[start + 2]]]
        assert recorder.error is None
    assert isinstance(pairs[3][1].error, ForwardError)
    assert "ValueError: too much" in pairs[3][1].text
    assert pairs[3][1].values == []
    assert model.sizes[-2:] == [3, 3]  # they share the other steps
    assert streams.stepped == sum(model.sizes)


@pytest.mark.parametrize(
    "limits", [{}, {"fails_at": 30}, {"most": 2}], ids=["one step", "halves", "out of memory"]
)
def test_outputs_that_share_memory(limits: dict[str, float]) -> None:
    """Streams get their own values even if another call overwrites the outputs' memory."""

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

    pairs = _kept(4)
    _run(Reuses(**limits), *pairs)  # type: ignore[arg-type]
    for number, (_, recorder) in enumerate(pairs):
        start = 10.0 * number
        fails = start >= limits.get("fails_at", 1e9)
        assert recorder.values == ([] if fails else [[[start]], [[start + 1]], [[start + 2]]])


def test_without_retry() -> None:
    """With RETRY_FAILED_BATCH=false, a failed step ends all its streams."""
    model, pairs = Counter(fails_at=30), _kept(4)
    _run(model, *pairs, retry_failed_batch=False)
    assert all(isinstance(recorder.error, ForwardError) for _, recorder in pairs)
    assert model.sizes == [4]


def test_steps_that_call_other_models() -> None:
    """A step that has called another model and fails is not run again for halves of its streams."""

    class Calls(Counter):
        def step(self, states: list[State]) -> list[tuple[State | None, Tensor]]:
            model("other")()
            return super().step(states)

    failing, pairs = Calls(fails_at=30), _kept(4)
    with stand_in({"other": dict}):
        _run(failing, *pairs)
    assert all(isinstance(recorder.error, ForwardError) for _, recorder in pairs)
    assert failing.sizes == [4]


class Silent:
    """Makes a response in every second step and none in the last; may make none at all."""

    def begin(self, x: Tensor) -> int | None:
        return int(x) or None

    def step(self, states: list[int]) -> list[tuple[int | None, Tensor | None]]:
        return [
            (left - 1 or None, torch.full((1, 1), float(left)) if left % 2 == 0 else None)
            for left in states
        ]


@pytest.mark.parametrize(("start", "values"), [(5.0, [4.0, 2.0]), (1.0, []), (0.0, [])])
def test_steps_without_a_response(start: float, values: list[float]) -> None:
    """Outputs of None make no response; a state of None ends the stream."""
    recorder = Recorder()
    _run(Silent(), (item(start), recorder))
    assert recorder.values == [[[value]] for value in values]
    assert recorder.error is None


class Held:
    """A state that a weak reference can point to."""


def test_states_are_released() -> None:
    """A stream keeps its current state only: states may hold most of the memory."""
    states: list[weakref.ref[Held]] = []
    alive: list[bool] = []

    class Model:
        def begin(self, x: Tensor) -> Held:
            return self._next()

        def step(self, held: list[Held]) -> list[tuple[Held | None, Tensor]]:
            alive.append(states[0]() is not None)
            return [(self._next() if len(alive) < 4 else None, torch.ones(1, 1))]

        def _next(self) -> Held:
            state = Held()
            states.append(weakref.ref(state))
            return state

    recorder = Recorder()
    _run(Model(), (item(1), recorder))
    assert len(recorder.values) == 4
    assert alive[0]
    assert not any(alive[2:])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([], "step() returned a list of 0 for 1 stream"),
        ([torch.ones(1)], "step() returned a list of 1 for 1 stream"),
        (
            [(None, None, None)],
            "step() returned a list of 1 for 1 stream; expected a list with a pair",
        ),
        (torch.ones(1, 2), "step() returned a Tensor"),
    ],
)
def test_step_returns_something_else(returned: Any, message: str) -> None:
    """If step() does not return a pair for each stream, the error says what it returned."""
    recorder = Recorder()
    run(engine(Counter().begin, lambda states: returned), (item(1), recorder))
    assert isinstance(recorder.error, OutputError)
    assert message in str(recorder.error)
