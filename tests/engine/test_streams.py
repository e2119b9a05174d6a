"""Streams: their responses, the order of these, and how streams end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any

import fake_gpu
import pytest
import torch
from streamed import Recorder, engine, item, run
from torch import Tensor

from torch_py_backend.config.options import Options
from torch_py_backend.engine import runtime
from torch_py_backend.engine.runtime import Runtime
from torch_py_backend.engine.streams import Streams
from torch_py_backend.errors import CancelledError, ForwardError
from torch_py_backend.values import Value


def test_streams_take_turns() -> None:
    """Streams alternate step by step."""
    order = []

    def forward(x: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            order.append(int(x))
            yield x

    run(engine(forward), (item(1), Recorder()), (item(2), Recorder()))
    assert order == [1, 2] * 3


def test_an_awaiting_stream_does_not_block_others() -> None:
    """While an asynchronous stream awaits, the others run."""
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


def test_any_exception_ends_the_stream() -> None:
    """Exceptions that end programs, tasks or generators are ForwardErrors of the stream."""
    for error in (SystemExit, asyncio.CancelledError, GeneratorExit):

        def forward(x: Tensor, error: type[BaseException] = error) -> Iterator[Tensor]:
            yield x
            raise error

        recorder = Recorder()
        run(engine(forward), (item(1), recorder))
        assert isinstance(recorder.error, ForwardError)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_outputs_go_to_where_the_request_was(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of a stream stay on the GPU only if the request's inputs were there."""
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(
        Runtime, "to_device", lambda _, columns: [fake_gpu.put(column) for column in columns]
    )
    model = engine(lambda x: fake_gpu.put(2 * x))
    model.runtime = dataclasses.replace(
        runtime.create(Options(), torch.device("cpu"), ()),
        device=fake_gpu.DEVICE,
        host_inputs=False,
    )
    with model.preparing():  # the stages are chosen again
        pass
    sent: list[Any] = []

    class Keeps(Recorder):
        def send(self, outcome: dict[str, Value], *, last: bool) -> None:
            super().send(outcome, last=last)
            sent.append(outcome["y"])

    x = torch.ones(1, 2)
    recorder = Keeps()
    run(model, ({"x": fake_gpu.put(x) if on_gpu else x}, recorder))
    assert recorder.values == [[[2.0, 2.0]]]
    assert [value.is_cuda for value in sent] == [on_gpu]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_cancellation_closes_the_generator(asynchronous: bool) -> None:
    """When a request is cancelled, its generator is closed and its clean-up runs."""
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

    recorder = Recorder(leaves_after=4)
    run(engine(awaited if asynchronous else forward), (item(3), recorder))
    assert closed == [3]
    assert len(recorder.values) == 4
    assert isinstance(recorder.error, CancelledError)


def test_a_model_that_swallows_its_cancellation() -> None:
    """Its stream ends with its next response."""
    reached = asyncio.Event()

    async def forward(x: Tensor) -> AsyncIterator[Tensor]:
        with contextlib.suppress(asyncio.CancelledError):
            reached.set()
            await asyncio.Event().wait()
        for _ in range(3):
            yield x

    recorder = Recorder()

    async def leave() -> None:
        task = asyncio.create_task(Streams(engine(forward)).run(item(1), recorder))
        await reached.wait()
        recorder.refusal = CancelledError()
        task.cancel()
        recorder.error = await task

    asyncio.run(leave())
    assert isinstance(recorder.error, CancelledError)
    assert recorder.values == []


def test_closing_a_generator_fails(caplog: pytest.LogCaptureFixture) -> None:
    """An exception raised while a generator is closed is logged and has no other effect."""

    def forward(x: Tensor) -> Iterator[Tensor]:
        try:
            while True:
                yield x
        finally:
            raise ValueError("not so fast")

    recorder = Recorder(leaves_after=1)
    run(engine(forward), (item(3), recorder))
    assert isinstance(recorder.error, CancelledError)
    assert "closing a stream raised ValueError: not so fast" in caplog.text


def test_context_of_each_step() -> None:
    """The beginning and end of each step are reported; inference mode is enabled in it."""

    def forward(x: Tensor) -> Iterator[Tensor]:
        for _ in range(2):
            yield x + torch.is_inference_mode_enabled()

    model, recorder = engine(forward), Recorder()
    events: list[str] = []
    model.failures.on_call = lambda: events.append("busy")

    @contextlib.contextmanager
    def around_call() -> Iterator[None]:
        yield
        events.append("idle")

    streams = Streams(model, around_call)
    asyncio.run(streams.run(item(1), recorder))
    assert events == ["busy", "idle"] * (len(events) // 2)
    assert len(events) >= 2 * 3
    assert recorder.values == [[[2.0]], [[2.0]]]


def test_a_context_open_during_an_await() -> None:
    """A stream that awaits within a thread-wide context ends; no other stream runs in it."""
    inside = []

    async def forward(x: Tensor) -> AsyncIterator[Tensor]:
        if int(x) == 1:
            with torch.autocast("cpu"):
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        inside.append(torch.is_autocast_enabled("cpu"))
        yield x

    before = runtime.thread_state(torch.device("cpu"))
    failing, other = Recorder(), Recorder()
    run(engine(forward), (item(1), failing), (item(2), other))
    assert "or awaits there" in str(failing.error)
    assert failing.text == ""
    assert other.values == [[[2.0]]]
    assert inside == [False]
    assert runtime.thread_state(torch.device("cpu")) == before
