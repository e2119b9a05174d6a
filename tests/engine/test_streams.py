from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from unittest import mock

import engines
import fake_gpu
import pytest
import torch
from torch import Tensor

from torch_py_backend.composition import model, stand_in
from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.streams import Streams
from torch_py_backend.errors import BackendError, ForwardError, OutputError
from torch_py_backend.values import Value


class Client:
    """The client of a stream of a value: keeps the responses, and leaves after so many."""

    def __init__(self, value: float = 1.0, leaves_after: int | None = None) -> None:
        self.item: dict[str, Value] = {"x": torch.tensor([[float(value)]])}
        self.values: list[Any] = []
        self.on_gpu: list[bool] = []
        self.error: BackendError | None = None
        self._leaves_after = leaves_after

    async def receive(self, streams: Streams) -> None:
        self.error = await streams.run(self.item, self.send)

    def send(self, outcome: dict[str, Value], last: bool) -> bool:
        y = torch.as_tensor(outcome["y"])
        self.values.append(y.tolist())
        self.on_gpu.append(y.is_cuda)
        return len(self.values) != self._leaves_after


def engine(function: Any, step: Callable[[list[Any]], Any] | None = None, **how: Any) -> Engine:
    """An engine of one input `x` and one output `y`, both FP32 [-1], in rows."""
    return engines.engine(function, step=step, decoupled=True, **how)


def run(model: Engine, *clients: Client) -> Streams:
    streams = Streams(model)

    async def together() -> None:
        with runtime.mode(model.config.options):
            await asyncio.gather(*(client.receive(streams) for client in clients))

    asyncio.run(together())
    return streams


def test_streams_take_turns() -> None:
    order = []

    def forward(x: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            order.append(int(x))
            yield x

    run(engine(forward), Client(1), Client(2))
    assert order == [1, 2] * 3


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_any_exception_ends_the_stream(error: type[BaseException]) -> None:
    def forward(x: Tensor) -> Iterator[Tensor]:
        yield x
        raise error

    client = Client()
    run(engine(forward), client)
    assert isinstance(client.error, ForwardError)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_outputs_go_to_where_the_request_was(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(Engine, "to_device", lambda _, columns: list(map(fake_gpu.put, columns)))
    model = engine(lambda x: fake_gpu.put(2 * x))
    model.device, model.host_inputs = fake_gpu.DEVICE, False
    with model.preparing():  # the stages are chosen again
        pass
    client = Client()
    if on_gpu:
        client.item["x"] = fake_gpu.put(torch.as_tensor(client.item["x"]))
    run(model, client)
    assert client.values == [[[2.0]]]
    assert client.on_gpu == [on_gpu]


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

    client = Client(leaves_after=leaves)
    run(engine(forward), client)
    assert says in str(client.error)


def test_each_call_of_the_model_has_a_time_limit_of_its_own() -> None:
    model, called = engine(lambda x: iter([x, x])), mock.Mock()
    model.failures.on_call = called
    run(model, Client())
    assert called.call_count == 1 + 2 + 1  # forward(), two responses, the end


def test_a_stream_that_yields_within_a_thread_wide_context_ends_and_no_other_runs_in_it() -> None:
    inside = []

    async def forward(x: Tensor) -> AsyncIterator[Tensor]:
        if int(x) == 1:
            with torch.autocast("cpu"):
                yield x
        await asyncio.sleep(0)
        inside.append(torch.is_autocast_enabled("cpu"))
        yield x

    before = runtime.thread_state(torch.device("cpu"))
    failing, other = Client(1), Client(2)
    run(engine(forward), failing, other)
    assert isinstance(failing.error, OutputError)
    assert "yields within torch.autocast" in str(failing.error)
    assert failing.error.traceback == ""
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


def test_a_stream_that_ends_leaves_the_shared_step_and_one_that_begins_later_joins_it() -> None:
    model = Counter(4)
    streams = Streams(engine(model.begin, model.step))
    late, begun = Client(10), list[asyncio.Task[None]]()

    class Early(Client):
        def send(self, outcome: dict[str, Value], last: bool) -> bool:
            if not begun:
                begun.append(asyncio.create_task(late.receive(streams)))
            return super().send(outcome, last)

    early = Early(0, leaves_after=3)

    async def staggered() -> None:
        await early.receive(streams)
        await begun[0]

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

    model = Reuses(**limits)  # type: ignore[arg-type]
    served, clients = engine(model.begin, model.step), [Client(10 * place) for place in range(4)]
    run(served, *clients)
    failed = clients.pop() if "fails_at" in limits else None
    for place, client in enumerate(clients):
        assert client.values == [[[10 * place + tick]] for tick in range(3)]
        assert client.error is None
    if failed is not None:
        assert failed.values == []
        assert isinstance(failed.error, ForwardError)
        assert "ValueError: too much" in failed.error.traceback
    assert model.sizes[-1] == (2 if "most" in limits else len(clients))  # shared again
    assert served.counts.stepped_streams == sum(model.sizes)


@pytest.mark.parametrize("calls", [False, True], ids=["RETRY_FAILED_BATCH", "a call"])
def test_steps_that_are_not_run_again(calls: bool) -> None:
    """A failed step ends all its streams without retries, or if it has called another model."""

    class Calls(Counter):
        def step(self, states: list[State]) -> list[tuple[State | None, Tensor]]:
            if calls:
                model("other")()
            return super().step(states)

    failing, clients = Calls(fails_at=30), [Client(value) for value in (0, 10, 20, 30)]
    retry = None if calls else False
    with stand_in({"other": dict}):
        run(engine(failing.begin, failing.step, retry_failed_batch=retry), *clients)
    assert all(isinstance(client.error, ForwardError) for client in clients)
    assert failing.sizes == [4]


def test_a_stream_keeps_its_current_state_only() -> None:
    """States may hold most of the memory."""
    first: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def begin(x: Tensor) -> Tensor:
        state = torch.ones(1, 1)
        first.append(weakref.ref(state))
        return state

    def step(states: list[Tensor]) -> list[tuple[Tensor | None, Tensor]]:
        alive.append(first[0]() is not None)
        return [(torch.ones(1, 1) if len(alive) < 4 else None, torch.ones(1, 1))]

    run(engine(begin, step), Client())
    assert len(alive) == 4
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
    enabled, clients = torch.is_autocast_enabled("cpu"), [Client(), Client()]
    called = mock.Mock(side_effect=step)
    try:
        run(engine(Counter().begin, called), *clients)
    finally:
        torch.set_autocast_enabled("cpu", enabled)
    assert called.call_count == 1
    for client in clients:
        assert isinstance(client.error, OutputError)
        assert says in str(client.error)
