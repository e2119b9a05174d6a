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
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.stream_calls import StreamInputs
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    OutputError,
    UnavailableError,
    summarize,
)
from torch_py_backend.pipeline import faults
from torch_py_backend.pipeline.failures import Failure, reported
from torch_py_backend.streaming.continuous_batching import StepError, Stepper
from torch_py_backend.values import Item, Outcome, Value

log = logging.getLogger(__name__)

T = TypeVar("T")
Outcomes: TypeAlias = "AsyncGenerator[tuple[Outcome | None, bool], None]"
_END = object()
# The number of responses in a trial.
_TRIAL_RESPONSES = 3


class Consumer(Protocol):
    """Receives the outcomes of a stream. A last outcome, or a call of `end`, ends the stream."""

    def send(self, outcome: dict[str, Value], *, last: bool) -> None:
        """Send one response."""

    def end(self, error: BackendError | None, text: str = "") -> None:
        """End without another response; with the error and its traceback if the stream failed."""

    def cancelled(self) -> bool:
        """Return whether the request was cancelled. Called after each step but the last."""


class Streams:
    """The streams of one model. Used within one event loop.

    Attributes:
        live: number of streams that have begun and not ended.
        closing: whether the model is being unloaded, which cancels the remaining streams.
        steps: calls step() of a module that has one, else None.

    Args:
        around_call: returns a context manager that is entered around each call of the model's code.
    """

    def __init__(
        self,
        engine: Engine,
        around_call: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.live = 0
        self.closing = False
        self.steps = Stepper(engine, self.calling) if engine.loaded.step is not None else None
        self._engine = engine
        self._model = engine.config.name
        self._around_call = around_call

    async def run(self, item: Item, consumer: Consumer) -> None:
        """Run one stream to its end. Errors go to the consumer."""
        self.live += 1
        result: object = None
        failure: Failure | None = None
        try:
            try:
                self._check_device()
                with self.calling():
                    result, inputs = self._engine.stream_calls.begin(item)
                source = self._outcomes(result, inputs)
                if self.steps is not None:  # the first state must not live as long as its stream
                    result = None
                async with contextlib.aclosing(source) as outcomes:
                    await self._send(outcomes, consumer)
            except BaseException as error:
                failure = self.failure(error, consumer)
            try:  # the model's own code, which may keep something for a stream that has ended
                if isinstance(result, Generator):
                    with self.calling():
                        result.close()
                elif isinstance(result, AsyncIterator) and hasattr(result, "aclose"):
                    await _Sliced(result.aclose(), self)
            except BaseException as error:
                log.warning(
                    "model '%s': closing a stream raised %s.", self._model, summarize(error)
                )
            self._engine.clean()
        finally:
            self.live -= 1
        if failure is not None:
            consumer.end(self._engine.failures.fatal or failure.error, failure.text)

    async def _send(self, outcomes: Outcomes, consumer: Consumer) -> None:
        async for outcome, last in outcomes:
            if isinstance(outcome, BackendError):
                raise outcome
            self._check_device()
            if outcome is not None:
                consumer.send(outcome, last=last)
                if last:
                    return
            elif last:
                break
            if consumer.cancelled():
                raise CancelledError("in mid-stream")
        self._check_device()
        consumer.end(None)

    def _check_device(self) -> None:
        """Raise the fatal error of the process, which another stream may have met."""
        if self._engine.failures.fatal is not None:
            raise self._engine.failures.fatal

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Enter the context of a call of the model."""
        with self._around_call(), self._engine.calling():
            yield

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
                    "the model yields within torch.autocast or a torch.device, or awaits there:"
                    " other streams would then run in it",
                    expected="such contexts closed before each yield and await",
                )

    def advance(self, resume: Callable[[], T]) -> T:
        """Resume one stream and return the result. Called within `calling`."""
        began = time.perf_counter()
        try:
            return resume()
        finally:
            self._engine.counts.forward_seconds += time.perf_counter() - began

    def outcome(self, result: object, inputs: StreamInputs) -> Outcome:
        """Return the outcome for a result of the model. Called within `calling`."""
        (outcome,) = self._engine.stream_calls.outcomes([(result, inputs)])
        return outcome

    async def _outcomes(self, result: object, inputs: StreamInputs) -> Outcomes:
        """Yield the outcomes of a stream, and whether each is the last.

        A step without a response has the outcome None. Other streams run between two responses.
        """
        if self.steps is not None:
            while result is not None:
                step = await self.steps.next(result, inputs)
                result = step.state
                yield step.outcome, result is None
        elif isinstance(result, AsyncIterator):
            while True:
                await asyncio.sleep(0)  # the model may never await
                value = await _Sliced(anext(result, _END), self, advances=True)
                if value is _END:
                    return
                with self.calling():
                    outcome = self.outcome(value, inputs)
                del value  # before the next one is computed
                yield outcome, False
        elif isinstance(result, Iterator):
            while True:
                await asyncio.sleep(0)
                with self.advancing():
                    value = self.advance(partial(next, result, _END))
                    if value is _END:
                        return
                    outcome = self.outcome(value, inputs)
                del value
                yield outcome, False
        else:
            with self.calling():
                outcome = self.outcome(result, inputs)
            yield outcome, True

    def failure(self, error: BaseException, consumer: Consumer) -> Failure:
        """Return the failure for an exception that ended a stream, and clear its frames."""
        try:
            if isinstance(error, StepError):
                return Failure(error.error, error.error.traceback)
            if isinstance(error, asyncio.CancelledError) and self.closing:
                return Failure(
                    UnavailableError("the model is unloaded in mid-stream", cure="Retry later.")
                )
            if isinstance(error, asyncio.CancelledError | CancelledError) and consumer.cancelled():
                return Failure(CancelledError("in mid-stream"))
            return self._engine.failures.classify(error)
        finally:
            # The future that a task awaits refers to the exception that it raises: a reference
            # cycle, which would keep the request's tensors until the next garbage collection.
            faults.release(error)


class _Sliced(Awaitable[T]):
    """An awaitable of the model, run as one call of the model for each slice between two awaits.

    Args:
        streams: provides the context of the calls.
        advances: whether the awaitable makes a response. Each slice must then close the contexts
            that it enters.
    """

    def __init__(
        self, awaitable: Awaitable[T], streams: Streams, *, advances: bool = False
    ) -> None:
        self._awaitable, self._streams = awaitable, streams
        self._calling = streams.advancing if advances else streams.calling

    def __await__(self) -> Generator[object, None, T]:
        coroutine = self._awaitable.__await__()
        resume: Callable[[], object] = coroutine.__next__
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
    """Keeps the last of the first responses of a stream, and cancels the rest."""

    def __init__(self) -> None:
        self.outcome: Outcome = {}
        self._responses = 0

    def send(self, outcome: dict[str, Value], *, last: bool) -> None:  # noqa: ARG002  a Consumer's
        self.outcome = outcome
        self._responses += 1

    def end(self, error: BackendError | None, text: str = "") -> None:
        if error is not None and not isinstance(error, CancelledError):
            self.outcome = reported(error, text)

    def cancelled(self) -> bool:
        return self._responses >= _TRIAL_RESPONSES


def trial(engine: Engine) -> Callable[[Sequence[Item]], Sequence[Outcome]]:
    """Return a function that runs the first responses of each item's stream.

    Its outcomes are the last of these responses of each stream, or the first error of all streams.
    """

    async def run(items: Sequence[Item]) -> Sequence[Outcome]:
        streams = Streams(engine)
        # With step(), each item is run twice: a step of one stream differs from one of several.
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
