"""A request's stream: a sequence of outcomes from the value that the model returned for its item.

A generator or any other iterator, synchronous or asynchronous, is a stream of its values. The value
of begin() of a module with step() is the first state of a stream. Any other value is a stream of
one response.

All streams of a model take turns in one event loop. Each waits for at most one step of each other
stream. A stream that awaits does not block the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import Item, Outcome, Value
from torch_py_backend.engine import faults
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.retry import Failure, reported
from torch_py_backend.engine.stream_calls import StreamInputs
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    OutputError,
    UnavailableError,
    summarize,
)
from torch_py_backend.streaming import continuous_batching
from torch_py_backend.streaming.continuous_batching import StepError, Stepper

log = logging.getLogger(__name__)

T = TypeVar("T")
_END = object()
# Limits of a trial: responses, and steps without a response.
_TRIAL_RESPONSES = 3
_MAX_TRIAL_STEPS = 1000


class Consumer(Protocol):
    """Receives the outcomes of a stream. A last outcome, or a call of `end`, ends the stream."""

    def take(self, outcome: dict[str, Value], *, last: bool) -> None:
        """Take one response."""

    def end(self, error: BackendError | None, text: str = "") -> None:
        """End without another response; with the error and its traceback if the stream failed."""

    def cancelled(self) -> bool:
        """Return whether the request was cancelled. Called after each step."""


class _Source(Protocol):
    """The source of a stream's outcomes."""

    async def next(self) -> tuple[Outcome | None, bool]:
        """Return the next outcome, None if a step made none, and whether it is the last."""

    async def close(self) -> None:
        """Free what the model keeps for this stream, which may have ended already."""


class Streams:
    """The streams of one model. Used within one event loop.

    Attributes:
        live: number of streams that have begun and not ended.
        counts: the engine's counters.
        closing: whether the model is being unloaded, which cancels the remaining streams.
        steps: calls step() of a module that has one, else None.

    Args:
        engine: the model.
        rests: called after each call of the model's code.
    """

    def __init__(self, engine: Engine, rests: Callable[[], None] = lambda: None) -> None:
        self.live = 0
        self.counts = engine.counts
        self.closing = False
        self.steps = Stepper(engine, self.calling) if engine.loaded.step is not None else None
        self._engine = engine
        self._model = engine.config.name
        self._rests = rests

    async def run(self, item: Item, consumer: Consumer) -> None:
        """Run one stream to its end. Errors go to the consumer."""
        self.live += 1
        source: _Source | None = None
        failure: Failure | None = None
        try:
            try:
                source = self._begin(item)
                await self._pass_on(source, consumer)
            except BaseException as error:
                failure = self.failure(error, consumer)
            if source is not None:
                try:
                    await source.close()
                except BaseException as error:  # the model's own code, after its last response
                    log.warning(
                        "model '%s': closing a stream raised %s.", self._model, summarize(error)
                    )
            self._engine.clean()
        finally:
            self.live -= 1
        if failure is not None:
            consumer.end(self._engine.recovery.fatal or failure.error, failure.text)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Enter the context of a call of the model."""
        try:
            with self._engine.calling():
                yield
        finally:
            self._rests()

    @contextlib.contextmanager
    def advancing(self) -> Iterator[None]:
        """Enter the context of a call that resumes the model until its next response.

        Raises:
            OutputError: the model leaves a context open, which would affect all streams.
        """
        with self.calling():
            before = runtime.thread_state(self._engine.device)
            yield
            if runtime.thread_state(self._engine.device) != before:
                raise OutputError(
                    self._model,
                    "the model yields within torch.autocast or a torch.device, or awaits there:"
                    " other streams would then run in it",
                    expected="such contexts closed before each yield and await",
                )

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Enter `advancing` and count the time as forward time."""
        with self.advancing():
            began = time.perf_counter()
            yield
            self.counts.forward_seconds += time.perf_counter() - began

    def advance(self, resume: Callable[[], Any]) -> Any:
        """Resume one stream and return the result. Called within `calling`."""
        return self._engine.stream_calls.advance(resume)

    def outcome(self, result: Any, given: StreamInputs) -> Outcome:
        """Return the outcome for a result of the model. Called within `calling`."""
        (outcome,) = self._engine.stream_calls.outcomes([(result, given)])
        return outcome

    def _begin(self, item: Item) -> _Source:
        if self._engine.recovery.fatal is not None:
            raise self._engine.recovery.fatal
        with self.calling():
            result, given = self._engine.stream_calls.begin(item)
        if self.steps is not None:
            return _StepSource(self.steps, result, given)
        if isinstance(result, AsyncIterator):
            return _AsyncIteratorSource(self, result, given)
        if isinstance(result, Iterator):
            return _IteratorSource(self, result, given)
        return _SingleSource(self, result, given)

    async def _pass_on(self, source: _Source, consumer: Consumer) -> None:
        last = False
        while not last:
            outcome, last = await source.next()
            if isinstance(outcome, BackendError):
                raise outcome
            if self._engine.recovery.fatal is not None:
                raise self._engine.recovery.fatal
            if outcome is not None:
                consumer.take(outcome, last=last)
            elif last:
                consumer.end(None)
            if not last and consumer.cancelled():
                raise CancelledError(self._model, "in mid-stream")

    def failure(self, error: BaseException, consumer: Consumer) -> Failure:
        """Return the failure for an exception that ended a stream, and clear its frames."""
        try:
            if isinstance(error, StepError):
                return error.failure
            if isinstance(error, asyncio.CancelledError) and self.closing:
                return Failure(
                    UnavailableError(
                        self._model, "the model is unloaded in mid-stream", cure="Retry later."
                    )
                )
            if isinstance(error, asyncio.CancelledError | CancelledError) and consumer.cancelled():
                return Failure(CancelledError(self._model, "in mid-stream"))
            return self._engine.recovery.judge(error)
        finally:
            # The future that a task awaits refers to the exception that it raises: a reference
            # cycle, which would keep the request's tensors until the next garbage collection.
            faults.release(error)


class _SingleSource:
    """A result that is not a stream: the only response."""

    def __init__(self, streams: Streams, result: Any, given: StreamInputs) -> None:
        self._streams, self._result, self._given = streams, result, given

    async def next(self) -> tuple[Outcome | None, bool]:
        with self._streams.calling():
            return self._streams.outcome(self._result, self._given), True

    async def close(self) -> None:
        del self._result


class _IteratorSource:
    """The values of a generator or another iterator."""

    def __init__(self, streams: Streams, results: Iterator[Any], given: StreamInputs) -> None:
        self._streams, self._results, self._given = streams, results, given

    async def next(self) -> tuple[Outcome | None, bool]:
        await asyncio.sleep(0)  # run the other streams
        with self._streams.advancing():
            began = time.perf_counter()
            result = self._streams.advance(partial(next, self._results, _END))
            self._streams.counts.forward_seconds += time.perf_counter() - began
            if result is _END:
                return None, True
            return self._streams.outcome(result, self._given), False

    async def close(self) -> None:
        if isinstance(self._results, Generator):
            with self._streams.calling():
                self._results.close()


class _AsyncIteratorSource:
    """The values of an asynchronous iterator. While it awaits, other streams run."""

    def __init__(self, streams: Streams, results: AsyncIterator[Any], given: StreamInputs) -> None:
        self._streams, self._results, self._given = streams, results, given

    async def next(self) -> tuple[Outcome | None, bool]:
        await asyncio.sleep(0)  # run the other streams, even if this one never awaits
        result = await _Sliced(anext(self._results, _END), self._streams, advances=True)
        if result is _END:
            return None, True
        with self._streams.calling():
            return self._streams.outcome(result, self._given), False

    async def close(self) -> None:
        close = getattr(self._results, "aclose", None)
        if close is not None:
            await _Sliced(close(), self._streams)


class _StepSource:
    """The outcomes of a stream of a module with begin() and step()."""

    def __init__(self, stepper: Stepper, state: Any, given: StreamInputs) -> None:
        self._stepper, self._state, self._given = stepper, state, given

    async def next(self) -> tuple[Outcome | None, bool]:
        if self._state is None:
            return None, True
        result = await self._stepper.next(self._state, self._given)
        self._state = result.state
        return result.outcome, result.state is None

    async def close(self) -> None:
        del self._state


class _Sliced(Awaitable[T]):
    """An awaitable of the model, run as one call of the model for each slice between two awaits.

    Args:
        awaitable: the awaitable.
        streams: provides the context of the calls.
        advances: whether the awaitable makes a response. Each slice must then close the contexts
            that it enters.
    """

    def __init__(
        self, awaitable: Awaitable[T], streams: Streams, *, advances: bool = False
    ) -> None:
        self._awaitable, self._streams = awaitable, streams
        self._calling = streams.computing if advances else streams.calling

    def __await__(self) -> Generator[Any, None, T]:
        coroutine = self._awaitable.__await__()
        resume: Callable[[], Any] = coroutine.__next__
        while True:
            awaits = False
            try:
                with self._calling():
                    try:
                        awaited = self._streams.advance(resume)
                    except StopIteration as end:
                        result: T = end.value
                        return result
                    awaits = True
            except OutputError:
                if awaits:  # close the contexts in which it awaits: no other stream may run in them
                    with self._streams.calling(), contextlib.suppress(BaseException):
                        coroutine.throw(asyncio.CancelledError())
                raise
            try:
                yield awaited
                resume = coroutine.__next__
            except BaseException as error:  # thrown in by the event loop: the task is cancelled
                resume = partial(coroutine.throw, error)


# --- before READY ------------------------------------------------------------------------------


class _TrialConsumer:
    """Takes the first responses of a stream and cancels the rest."""

    def __init__(self) -> None:
        self.outcome: Outcome = {}
        self._taken = 0

    def take(self, outcome: dict[str, Value], *, last: bool) -> None:  # noqa: ARG002  a Consumer's
        self.outcome = outcome
        self._taken += 1

    def end(self, error: BackendError | None, text: str = "") -> None:
        if error is not None and not isinstance(error, CancelledError):
            self.outcome = reported(error, text)

    def cancelled(self) -> bool:
        return self._taken >= _TRIAL_RESPONSES


def trial(engine: Engine) -> Callable[[Sequence[Item]], Sequence[Outcome]]:
    """Return a function that runs the first responses of each item's stream.

    Its outcomes are the last of these responses of each stream, or the first error of all streams.
    """

    async def run(items: Sequence[Item]) -> Sequence[Outcome]:
        streams = Streams(engine)
        # With step(), each item is run twice: a step of several streams differs from one of one.
        count = len(items) * (2 if streams.steps else 1)
        consumers = [_TrialConsumer() for _ in range(count)]
        await asyncio.gather(
            *(
                streams.run(items[number % len(items)], consumer)
                for number, consumer in enumerate(consumers)
            )
        )
        outcomes = [consumer.outcome for consumer in consumers]
        error = next((outcome for outcome in outcomes if isinstance(outcome, BackendError)), None)
        return [error or outcome for outcome in outcomes[: len(items)]]

    return lambda items: asyncio.run(run(items))


def first_outputs(model: str, step: Callable[[list[Any]], Any] | None, result: Any) -> Any:
    """Return the first outputs of a value of forward(), whether it is a stream or not.

    Raises:
        OutputError: the stream has none.
    """
    if step is not None:
        return continuous_batching.first_outputs(model, step, result, _MAX_TRIAL_STEPS)
    outputs: Any = result
    if isinstance(result, AsyncIterator):
        outputs = asyncio.run(_first_awaited(result))
    elif isinstance(result, Iterator):
        outputs = next(result, _END)
        if isinstance(result, Generator):
            result.close()
    if outputs is _END:
        raise continuous_batching.no_outputs(model, _MAX_TRIAL_STEPS)
    return outputs


async def _first_awaited(results: AsyncIterator[Any]) -> Any:
    outputs = await anext(results, _END)
    close = getattr(results, "aclose", None)
    if close is not None:
        await close()
    return outputs
